"""A torch file of storages on a fake device and on the host: its checksums and its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_cufile import FakeCuFile
from support.fake_device import FakeDevice, on_device

from iobench.formats import torch_image
from iobench.formats.checked_image import CheckedImage
from iobench.testing import local_s3
from iobench.writers import registry
from iobench.writers.device.base import DeviceBytes
from iobench.writers.gds import GdsWriter
from iobench.writers.image import FileImage

_STATE = {
    "a": torch.randn(150_000),
    "b": [torch.arange(77), torch.zeros(0), torch.arange(40_000)],
    "c": [torch.arange(n) for n in range(1, 60)],
}


def _image(device: FakeDevice, *, host: int = 0) -> Any:
    """The image of the file with the storages on `device`, but each `host`-th one (1: all)."""
    described = torch_image.layout("stock.pt", _STATE)
    assert described is not None
    memories: dict[int, Any] = {}
    for number, (start, memory) in enumerate(described.memories().items()):
        assert isinstance(memory, np.ndarray)
        on_host = host and number % host == 0
        memories[start] = memory if on_host else device.upload(memory)
    image = described.image(memories)
    assert isinstance(image, CheckedImage)
    assert image.on_device is (host != 1)
    return image


@pytest.mark.parametrize("host", [0, 3, 1])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("buffered", {}),
        ("buffered", {"threads": 7}),
        ("uncached", {"threads": 2}),
        ("odirect", {"threads": 3}),
        ("uring", {"iodepth": 4}),
        ("hybrid", {}),
        ("aiofiles", {"iodepth": 3}),
    ],
)
def test_the_file_is_stocks(name: str, options: dict[str, Any], host: int, tmp_path: Path) -> None:
    """With the CRC32s, which are computed in the blocks: they are not copied first."""
    writer = registry.make(name, block_size="64KiB", **options)
    if not (answer := writer.available(tmp_path)).ok:
        pytest.skip(answer.reason)
    device = FakeDevice()
    image = _image(device, host=host)
    assert not device.copies, "made without a copy"
    (tmp_path / "ours").mkdir()
    writer.write(image, tmp_path / "ours")
    torch.save(_STATE, tmp_path / "stock.pt")
    want = (tmp_path / "stock.pt").read_bytes()
    assert (tmp_path / "ours/stock.pt").read_bytes() == want
    assert not device.pending


def test_one_pass_over_the_bus(tmp_path: Path) -> None:
    """Each byte is copied once by a writer that takes the blocks in order."""
    moved: list[int] = []

    class Counted(FakeDevice):
        def stream(self) -> Any:
            made = super().stream()
            copy = made.copy

            def counted(source: Any, destination: Any) -> None:
                moved.append(len(source))
                copy(source, destination)

            made.copy = counted  # type: ignore[method-assign]  # of this object only
            return made

    writer = registry.make("odirect", block_size="64KiB", threads=1)
    if not (answer := writer.available(tmp_path)).ok:
        pytest.skip(answer.reason)
    image = _image(Counted())
    writer.write(image, tmp_path)
    stored = [memory for _, memory in image.parts() if isinstance(memory, DeviceBytes)]
    assert sum(moved) == sum(map(len, stored))


def test_parts_of_an_object(tmp_path: Path) -> None:
    """The same by `s3`, whose workers send several parts at once."""
    torch.save(_STATE, tmp_path / "stock.pt")
    with local_s3() as server, server.active():
        registry.make("s3").write(_image(FakeDevice()), server.target)
        found = np.empty((tmp_path / "stock.pt").stat().st_size, dtype=np.uint8)
        registry.make("s3").read(FileImage.of("stock.pt", [found]), server.target)
    assert found.tobytes() == (tmp_path / "stock.pt").read_bytes()


def test_gds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that cuFile writes are copied to the host for the checksums."""
    device = FakeDevice()
    FakeCuFile(device).use(monkeypatch)
    if not (answer := registry.make("odirect").available(tmp_path)).ok:
        pytest.skip(answer.reason)
    made = on_device(GdsWriter, device)(block_size="64KiB")
    (tmp_path / "ours").mkdir()
    moved = made.write(_image(device), tmp_path / "ours")
    assert "gds" in moved.paths
    torch.save(_STATE, tmp_path / "stock.pt")
    want = (tmp_path / "stock.pt").read_bytes()
    assert (tmp_path / "ours/stock.pt").read_bytes() == want
