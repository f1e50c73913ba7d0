"""peer:safetensors: the safetensors library's own save_file and load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from iobench.peers.base import Peer, State
from iobench.writers.options import WriterOptions, option


@dataclass(frozen=True, kw_only=True)
class SafetensorsOptions(WriterOptions):
    """Options of `safetensors`."""

    backend: str = option("mmap", help="How safe_open reads the file.", choices=("mmap", "pread"))


class Safetensors(Peer):
    """Save: `save_file`, then fsync by the bench. Restore: `safe_open`, all tensors in memory."""

    name = "safetensors"
    summary = "safetensors' save_file and safe_open, every tensor copied out, with fsync"
    suffix = ".safetensors"
    modules = ("safetensors.torch",)
    packages = "safetensors"
    maps_files = True
    Options = SafetensorsOptions
    options: SafetensorsOptions

    def save(self, state: State, path: str) -> None:
        from safetensors.torch import save_file

        save_file(dict(state), path)

    def restore(self, path: str, wanted: State) -> State:
        from safetensors import safe_open

        with safe_open(path, framework="pt", backend=self.options.backend) as file:
            if self.options.backend != "mmap":
                return {name: file.get_tensor(name) for name in wanted}
            return {name: file.get_tensor(name).clone() for name in wanted}

    def restore_slices(
        self, path: str, wanted: State, slices: Mapping[str, tuple[slice, ...]]
    ) -> State:
        from safetensors import safe_open

        del wanted
        with safe_open(path, framework="pt", backend=self.options.backend) as file:
            return {name: file.get_slice(name)[index].clone() for name, index in slices.items()}
