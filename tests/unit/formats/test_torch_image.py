"""The image of torch.save's file equals that file byte for byte, for any state, on the host and on
a fake device."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_cufile import FakeCuFile
from support.fake_device import FakeDevice

from iobench.formats import torch_image
from iobench.formats.many_parts import CheckedImage
from iobench.formats.torch_image import crc32_setting
from iobench.testing import local_s3
from iobench.writers import registry
from iobench.writers.image import DeviceBytes, FileImage

_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]


def _made(path: str, state: Any, *, crc: bool = True, **options: Any) -> bytes:
    found = torch_image.image(path, state, crc=crc, **options)
    assert found is not None
    return b"".join(view.tobytes() for view in found.views(0, found.size_bytes))


def _stock(file: Path, state: Any, *, crc: bool = True, **options: Any) -> bytes:
    with crc32_setting(crc):
        torch.save(state, file, **options)
    return file.read_bytes()


def _random(size: int, dtype: torch.dtype) -> torch.Tensor:
    if not size:
        return torch.empty(0, dtype=dtype)
    data = np.random.default_rng(size).integers(0, 2, size * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype)


_tensors = st.builds(_random, st.integers(0, 3000), st.sampled_from(_DTYPES)).flatmap(
    lambda whole: st.sampled_from([whole, whole[::2], whole[1:]])
)
_states = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | _tensors,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(state=_states, crc=st.booleans())
def test_any_state(state: Any, crc: bool, tmp_path: Path) -> None:
    """Nested states of tensors and views, with CRC32 and without."""
    assert _made("s.pt", state, crc=crc) == _stock(tmp_path / "s.pt", state, crc=crc)


def test_the_memory_is_the_tensors_own() -> None:
    """Nothing is copied: a change of a tensor changes the image."""
    tensor = torch.zeros(1 << 16, dtype=torch.uint8)
    found = torch_image.image("t.pt", {"t": tensor}, crc=False)
    assert found is not None
    tensor[:] = 7
    assert max(len(view) for view in found.views(0, found.size_bytes)) == 1 << 16
    assert b"".join(v.tobytes() for v in found.views(0, found.size_bytes)).count(7) >= 1 << 16


def test_storages_elsewhere_have_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage outside host memory is written by the stream."""
    assert torch_image.image("m.pt", {"a": 1}) is not None
    elsewhere = SimpleNamespace(device=torch.device("meta"), nbytes=lambda: 0)
    stock = torch_image._pickled
    monkeypatch.setattr(torch_image, "_pickled", lambda *a: (stock(*a)[0], [elsewhere]))
    assert torch_image.image("m.pt", {"a": 1}) is None


@pytest.mark.parametrize(
    ("where", "name", "other"),
    [
        (torch_image, "hash_combine", lambda seed, _: seed),
        (torch_image._Records, "write_record", lambda *_: None),
        (torch_image, "_LAST", ".format_version"),
        (torch_image, "_LAST", "none"),
    ],
    ids=["checksum", "records", "a record too early", "a record that is missing"],
)
def test_a_torch_that_writes_otherwise(
    where: Any, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that differs from stock is detected before anything is saved."""
    torch_image.is_like_stock.cache_clear()
    monkeypatch.setattr(where, name, other)
    try:
        assert torch_image.image("m.pt", {"a": 1}) is None
    finally:
        torch_image.is_like_stock.cache_clear()


def test_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed would leave it behind."""
    torch_image.is_like_stock.cache_clear()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert torch_image.layout("a.pt", torch.arange(5), crc=True) is not None
    assert torch_image.image("a b.c.pt", {"a": 1}) is not None


@pytest.mark.parametrize("name", [".pt", "a\\.pt", "a\\"])
def test_a_name_that_torch_refuses(name: str, tmp_path: Path) -> None:
    """Nothing is left of it for the folder."""
    for save in (_made, lambda name, state: _stock(tmp_path / name, state)):
        with pytest.raises(RuntimeError, match="invalid file name"):
            save(name, [1])


def test_storages_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch must number the storages in the order in which it finds them."""

    def numbered_from_1(state: Any, file: Any, module: Any, protocol: int, _: bool) -> None:
        class Pickler(module.Pickler):
            def persistent_id(self, value: Any) -> Any:
                return ("storage", None, "1", "cpu", 3) if torch.is_storage(value) else None

        Pickler(io.BytesIO(), protocol=protocol).dump(state)
        file.write_record("byteorder", "little", 6)

    assert torch_image.image("m.pt", {"a": torch.ones(3)}) is not None
    monkeypatch.setattr(torch.serialization, "_save", numbered_from_1)
    with pytest.raises(ValueError, match="numbered the storages"):
        torch_image.image("m.pt", {"a": torch.ones(3)})


class _Nested:
    """An object that saves and loads a tensor itself while it is pickled."""

    def __getstate__(self) -> dict[str, bytes]:
        buffer = io.BytesIO()
        torch.save(torch.full((9,), 7.0), buffer)
        buffer.seek(0)
        assert torch.load(buffer).tolist() == [7.0] * 9
        return {"saved": buffer.getvalue()}


def test_an_object_that_calls_torch_while_it_is_pickled(tmp_path: Path) -> None:
    """Its own saves and loads have all their data."""
    state = {"a": torch.arange(100), "nested": _Nested()}
    assert _made("n.pt", state) == _stock(tmp_path / "n.pt", state)


def test_a_signal_handler_that_saves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At any line of torch's code an interrupted save leaves the handler's save complete."""
    state, emergency = {"a": torch.arange(100), "b": torch.ones(9)}, torch.full((9,), 7.0)
    torch.save(emergency, tmp_path / "emergency.pt")
    expected = (tmp_path / "emergency.pt").read_bytes()
    save, lines = torch.serialization._save, set[int]()

    def interrupted(frame: FrameType, event: str, _: Any) -> Any:
        """Save as a handler would, once before each line of `_save` and of what it defines."""
        if frame.f_code.co_filename != save.__code__.co_filename:
            return None
        if event == "line" and frame.f_lineno not in lines:
            lines.add(frame.f_lineno)
            torch.save(emergency, tmp_path / "emergency.pt")
            (tmp_path / "emergency.pt").rename(tmp_path / f"{frame.f_lineno}.pt")
        return interrupted

    before = sys.gettrace()
    sys.settrace(interrupted)
    try:
        made = _made("s.pt", state)
    finally:
        sys.settrace(before)
    assert made == _stock(tmp_path / "s.pt", state)
    assert len(lines) > 30
    for line in lines:
        assert (tmp_path / f"{line}.pt").read_bytes() == expected, line


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
        ("gds", {}),
    ],
)
def test_the_file_is_stocks(
    name: str,
    options: dict[str, Any],
    host: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the CRC32s, which are computed in the blocks: they are not copied first. Blocks that
    cuFile writes are copied to the host for them."""
    device = FakeDevice()
    if name == "gds":
        if not (answer := registry.make("odirect").available(tmp_path)).ok:
            pytest.skip(answer.reason)
        FakeCuFile(device).use(monkeypatch)
    writer = registry.make(name, block_size="64KiB", **options)
    if not (answer := writer.available(tmp_path)).ok:
        pytest.skip(answer.reason)
    before = device.copies  # of the answer
    image = _image(device, host=host)
    assert device.copies == before, "made without a copy"
    (tmp_path / "ours").mkdir()
    moved = writer.write(image, tmp_path / "ours")
    assert ("gds" in moved.paths) == (name == "gds" and host != 1)
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
