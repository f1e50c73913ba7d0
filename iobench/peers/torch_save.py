"""peer:torch-save: `torch.save` and `torch.load`, as in every training script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from iobench.peers.base import Peer, State
from iobench.writers.options import WriterOptions, option


@dataclass(frozen=True, kw_only=True)
class TorchSaveOptions(WriterOptions):
    """Options of `torch-save`."""

    crc: bool = option(True, help="Compute the zip's CRC32, the default of torch.save.")


class TorchSave(Peer):
    """`torch.save(state, path)`, then fsync by the bench: torch syncs nothing."""

    name = "torch-save"
    summary = "torch.save and torch.load, with fsync"
    suffix = ".pt"
    trains = True
    Options = TorchSaveOptions
    options: TorchSaveOptions

    def save(self, state: State, path: str) -> None:
        import torch

        from iobench.formats.torch_image import crc32_setting

        with crc32_setting(self.options.crc):
            torch.save(dict(state), path)

    def restore(self, path: str, wanted: State) -> State:  # noqa: ARG002
        import torch

        return cast(State, torch.load(path, weights_only=True))
