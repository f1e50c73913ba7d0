"""peer:torch-save-mmap: `torch.save`, and `torch.load` by mmap with a copy of every tensor."""

from __future__ import annotations

from iobench.peers.base import State
from iobench.peers.torch_save import TorchSave


class TorchSaveMmap(TorchSave):
    """`torch.load(mmap=True)` reads no data: a tensor's bytes are read when it is copied."""

    name = "torch-save-mmap"
    summary = "torch.save, and torch.load(mmap=True) with every tensor copied out"
    maps_files = True

    def restore(self, path: str, wanted: State) -> State:
        import torch

        mapped = torch.load(path, mmap=True, weights_only=True)
        return {name: mapped[name].clone() for name in wanted}
