"""A torch file of storages that are on a device, which is played: its checksums and its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from iobench.formats import torch_image
from iobench.formats.tensors import tensor_bytes
from iobench.testing.device import FakeDevice
from iobench.writers import registry


@pytest.mark.parametrize("piece", [64, 2**26])
def test_storages_on_a_device(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are described where they are, CRC32 included: what is written is stock's file."""
    state = {"a": torch.randn(500), "b": [torch.arange(77), torch.zeros(0)], "c": 1}
    torch.save(state, tmp_path / "stock.pt")
    assert torch_image.image("stock.pt", {}) is not None  # its own trial, not on a device
    device = FakeDevice()

    def on_device(storage: torch.UntypedStorage) -> Any:
        data = tensor_bytes(torch.empty(0, dtype=torch.uint8).set_(storage))
        if not len(data):
            return data
        there = device.upload(data)
        device.download(there)  # torch's own copies wait for the device
        return there

    monkeypatch.setattr(torch_image, "_memory", on_device)
    monkeypatch.setattr(torch_image, "_PIECE", piece)
    image = torch_image.image("stock.pt", state)
    assert image is not None
    assert image.on_device
    (tmp_path / "ours").mkdir()
    registry.make("odirect").write(image, tmp_path / "ours")
    assert (tmp_path / "ours/stock.pt").read_bytes() == (tmp_path / "stock.pt").read_bytes()
