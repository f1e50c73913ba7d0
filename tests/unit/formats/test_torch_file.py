"""torch files: what `save` writes is the stock file, and `load` reads the stock file."""

from __future__ import annotations

import functools
import tempfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import LoadEndianness, get_crc32_options

import iobench.torch
from iobench.errors import DataMismatchError
from iobench.formats import torch_file, torch_image
from iobench.formats.tensors import tensor_bytes
from iobench.formats.torch_image import crc32_setting


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("not this one")


_STATE = {"w": torch.arange(10_000.0), "n": [1, "two"]}


def _stock(state: Any, *, crc: bool = True, name: str = "model.pt", **options: Any) -> bytes:
    with crc32_setting(crc), tempfile.TemporaryDirectory() as directory:
        torch.save(state, Path(directory, name), **options)
        return Path(directory, name).read_bytes()


@pytest.mark.parametrize("composed", [True, False])
def test_an_unknown_torch_is_streamed(composed: bool, writer, tmp_path: Path, monkeypatch) -> None:
    """If the file cannot be composed like torch does it, torch writes it to our stream. Either way
    the Transfer has its bytes."""
    if not composed:
        monkeypatch.setattr(torch_image, "is_like_stock", lambda: False)
    transfer = torch_file.save(_STATE, "model.pt", tmp_path, writer)
    assert (transfer.bytes, transfer.durable) == ((tmp_path / "model.pt").stat().st_size, True)
    assert "serialize" in transfer.phases_s
    assert torch.equal(torch.load(tmp_path / "model.pt")["w"], _STATE["w"])


def test_memory_comes_from_the_caller(buffered, random_tensor, tmp_path: Path) -> None:
    """`allocate` is asked once for each storage, in the order of their keys, and used."""
    shared = random_tensor(torch.int8, 64)
    state = {"b": random_tensor(torch.float32, 5), "a": shared[:9], "again": shared}
    torch.save(state, tmp_path / "model.pt")
    given_out: list[Any] = []

    def allocate(size_bytes: int) -> Any:
        given_out.append(torch.empty(size_bytes, dtype=torch.uint8).numpy())
        return given_out[-1]

    found, image = torch_file.prepare("model.pt", tmp_path, allocate=allocate)
    assert [len(memory) for memory in given_out] == [20, 64]
    assert [found[n].data_ptr() for n in ("b", "a")] == [m.ctypes.data for m in given_out]
    buffered.read(image, tmp_path)
    assert given_out[1].tobytes() == tensor_bytes(shared).tobytes()


def test_saved_from_elsewhere_loads_on_the_cpu(buffered, tmp_path: Path, monkeypatch) -> None:
    """A file with storages of a GPU loads into CPU memory."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:7")
    torch.save(torch.arange(4), tmp_path / "model.pt")
    found, _ = torch_file.load("model.pt", tmp_path, buffered)
    assert (found.device.type, found.tolist()) == ("cpu", [0, 1, 2, 3])


@pytest.mark.parametrize("before", [True, False])
def test_crc_setting_is_restored(before: bool, buffered, tmp_path: Path) -> None:
    """torch's own CRC setting is unchanged afterwards, also after a failed save."""
    with crc32_setting(before):
        for crc in (True, False):
            torch_file.save({}, "model.pt", tmp_path, buffered, crc=crc)
            assert get_crc32_options() is before
            with pytest.raises(ValueError, match="not this one"):
                torch_file.save(_Unpicklable(), "model.pt", tmp_path, buffered, crc=crc)
            assert get_crc32_options() is before


def test_crc_setting_under_threads(buffered, tmp_path: Path) -> None:
    """Threads that save with and without CRC at once each get their own file."""
    start = threading.Barrier(4)

    def save(index: int) -> list[bytes]:
        start.wait(60)
        for turn in range(5):
            torch_file.save(_STATE, f"{index}-{turn}.pt", tmp_path, buffered, crc=index % 2 == 1)
        return [(tmp_path / f"{index}-{turn}.pt").read_bytes() for turn in range(5)]

    with ThreadPoolExecutor(4) as pool:
        for index, found in enumerate(pool.map(save, range(4))):
            for turn, data in enumerate(found):
                assert data == _stock(_STATE, crc=index % 2 == 1, name=f"{index}-{turn}.pt")
    assert get_crc32_options() is True


def test_load_does_not_wait_for_a_save(buffered, tmp_path: Path) -> None:
    """One thread loads while another one is saving."""
    saving, loaded = threading.Event(), threading.Event()

    class Slow:
        def __reduce__(self) -> Any:
            saving.set()
            assert loaded.wait(60)
            return int, ()

    torch.save({"a": 1}, tmp_path / "model.pt")
    with ThreadPoolExecutor(2) as pool:
        saved = pool.submit(torch_file.save, Slow(), "slow.pt", tmp_path, buffered)
        assert saving.wait(60)
        try:
            found, _ = pool.submit(torch_file.load, "model.pt", tmp_path, buffered).result(10)
        finally:
            loaded.set()
        assert (found, saved.exception(60)) == ({"a": 1}, None)


def test_a_tensor_beyond_its_storage(buffered, tmp_path: Path) -> None:
    """torch would make the storage larger and return whatever the memory holds."""
    tensor = torch.arange(1000.0)
    tensor.untyped_storage().resize_(0)
    torch.save({"a": tensor, "b": torch.ones(3)}, tmp_path / "a.pt")
    for load in (torch.load, functools.partial(iobench.torch.load, writer=buffered)):
        with pytest.raises(RuntimeError, match="storage"):
            load(tmp_path / "a.pt")
    with pytest.raises(DataMismatchError, match="exceeds its storage"):
        torch_file.load("a.pt", tmp_path, buffered)


def test_the_byte_order_that_is_set(buffered, tmp_path: Path) -> None:
    """It decides for files without a record of it, as torch 2.0 made; stock swaps the bytes."""
    torch.save(torch.arange(9), tmp_path / "new.pt")
    with zipfile.ZipFile(tmp_path / "new.pt") as new, zipfile.ZipFile(tmp_path / "a.pt", "w") as a:
        for name in new.namelist():
            if not name.endswith("/byteorder"):
                a.writestr(name, new.read(name))
    assert torch_file.load("a.pt", tmp_path, buffered)[0].tolist() == [*range(9)]
    torch.serialization.set_default_load_endianness(LoadEndianness.BIG)
    try:
        swapped = torch.load(tmp_path / "a.pt")
        assert swapped.tolist() == [number << 56 for number in range(9)]
        assert iobench.torch.load(tmp_path / "a.pt", writer=buffered).equal(swapped)
        with pytest.raises(DataMismatchError, match="byte order"):
            torch_file.load("a.pt", tmp_path, buffered)
    finally:
        torch.serialization.set_default_load_endianness(None)
