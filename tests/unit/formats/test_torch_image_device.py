"""A torch file of storages on a fake device: its checksums and its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_device import FakeDevice

from iobench.formats import torch_image, torch_layout
from iobench.writers import registry


@pytest.mark.parametrize("piece", [64, 2**26])
def test_storages_on_a_device(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are described without a copy, with their CRC32: the file is stock's."""
    state = {"a": torch.randn(500), "b": [torch.arange(77), torch.zeros(0)], "c": 1}
    torch.save(state, tmp_path / "stock.pt")
    described = torch_image.layout("stock.pt", state)
    assert described is not None
    device = FakeDevice()
    memories: dict[int, Any] = {}
    for start, memory in described.memories().items():
        assert isinstance(memory, np.ndarray)
        memories[start] = device.upload(memory)
        device.download(memories[start])  # torch's own copies wait for the device
    monkeypatch.setattr(torch_layout, "_PIECE", piece)
    image = described.image(memories)
    assert image.on_device
    (tmp_path / "ours").mkdir()
    registry.make("odirect").write(image, tmp_path / "ours")
    assert (tmp_path / "ours/stock.pt").read_bytes() == (tmp_path / "stock.pt").read_bytes()
