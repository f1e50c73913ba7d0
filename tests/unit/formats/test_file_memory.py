"""Files are restored into one allocation; each tensor has its own part. The collector is paused."""

from __future__ import annotations

import errno
import gc
import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.reentry import everywhere
from torch.utils.serialization import config

from iobench import linux
from iobench.errors import TransferError
from iobench.formats import collector, file_memory, torch_file
from iobench.formats import safetensors as our_safetensors
from iobench.formats.collector import collector_paused
from iobench.formats.file_memory import FileMemory
from iobench.writers.blocks import pages
from iobench.writers.blocks.pages import HUGE_PAGE, in_huge_pages
from iobench.writers.image import FileImage
from iobench.writers.local import direct_file
from iobench.writers.registry import make

Load = Callable[..., tuple[dict[str, torch.Tensor], object]]

_STATE = {
    "a": torch.arange(20_000, dtype=torch.float32),
    "b": torch.arange(7, dtype=torch.int16),
    "c": torch.arange(30_001, dtype=torch.int64),
}


def _save_safetensors(path: Path) -> None:
    safetensors.torch.save_file(_STATE, path)


def _save_torch(path: Path) -> None:
    torch.save(_STATE, path)


@pytest.fixture(params=["safetensors", "torch"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    """Load the file `model`, which each format's own library saved."""
    save, found = {
        "safetensors": (_save_safetensors, our_safetensors.load),
        "torch": (_save_torch, torch_file.load),
    }[request.param]
    save(tmp_path / "model")
    return found


@pytest.mark.parametrize("name", ["odirect", "uring"])
def test_only_the_tail_is_copied(
    name: str, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A direct read fills the tensors themselves, except for the bytes after the last block."""
    monkeypatch.setattr(direct_file, "host_takes_free_memory", lambda: False)
    writer = make(name, block_size="16KiB")
    answer = writer.available(tmp_path)
    if not answer.ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    copied: list[tuple[int, int]] = []
    scatter = FileImage.scatter

    def counted(image: FileImage, start: int, stop: int, block: np.ndarray) -> int:
        copied.append((start, stop))
        return scatter(image, start, stop, block)

    monkeypatch.setattr(FileImage, "scatter", counted)
    found, _ = load("model", tmp_path, writer)
    size = (tmp_path / "model").stat().st_size
    tail = size - size % (16 << 10)
    assert copied == [(tail, size)]
    assert all(torch.equal(found[key], tensor) for key, tensor in _STATE.items())


@pytest.mark.parametrize("given_back", [True, False])
def test_pages_of_both_sizes(
    given_back: bool, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors beyond a huge page come back right in huge pages and in others."""
    monkeypatch.setattr(pages, "host_takes_free_memory", lambda: given_back)
    monkeypatch.setitem(_STATE, "large", torch.arange(HUGE_PAGE // 8 + 99))
    _save_safetensors(tmp_path / "model") if load is our_safetensors.load else _save_torch(
        tmp_path / "model"
    )
    found, _ = load("model", tmp_path, make("buffered"))
    assert all(torch.equal(found[key], tensor) for key, tensor in _STATE.items())


def test_tensors_are_apart(load: Load, tmp_path: Path) -> None:
    """A storage is as long as its tensor, so that saving one tensor does not save all. Changing or
    dropping a tensor does not affect its neighbours."""
    found, _ = load("model", tmp_path, make("buffered"))
    sizes = {k: t.untyped_storage().nbytes() for k, t in found.items()}
    assert sizes == {k: t.nbytes for k, t in _STATE.items()}
    saved = io.BytesIO()
    torch.save(found["b"], saved)
    assert saved.tell() < 4096
    found["a"].zero_()
    found.pop("a")
    found["c"] += 1
    assert torch.equal(found.pop("b"), _STATE["b"])
    assert torch.equal(found["c"], _STATE["c"] + 1)


@pytest.mark.parametrize("alignment", [1, 8, 64])
def test_torch_file_of_other_alignment(alignment: int, tmp_path: Path) -> None:
    """Storages at odd places of a file are loaded to memory that fits every type."""
    with config.patch("save.storage_alignment", alignment):
        torch.save(_STATE, tmp_path / "model")
    found, _ = torch_file.load("model", tmp_path, make("buffered"))
    assert all(torch.equal(found[key], tensor) for key, tensor in _STATE.items())
    assert not any(tensor.data_ptr() % 16 for tensor in found.values())


@pytest.mark.parametrize("spaces", range(1, 8))
def test_safetensors_data_at_an_odd_place(spaces: int, tmp_path: Path) -> None:
    """A header whose length is not a multiple of 8 gives tensors at addresses that fit their
    types."""
    content = safetensors.torch.save(_STATE)
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" " * spaces
    (tmp_path / "model").write_bytes(
        len(header).to_bytes(8, "little") + header + content[8 + length :]
    )
    found, transfer = our_safetensors.load("model", tmp_path, make("buffered"))
    assert transfer.bytes == len(content) + spaces
    for key, tensor in _STATE.items():
        assert torch.equal(found[key], tensor)
        assert found[key].data_ptr() % tensor.itemsize == 0


@pytest.mark.parametrize("taken", [False, True])
def test_pages_are_huge_unless_the_host_takes_free_memory(
    taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "host_takes_free_memory", lambda: taken)
    (segment,) = FileMemory("file", 2 * HUGE_PAGE).image("file").segments
    assert in_huge_pages(segment.memory) is not taken


def test_image_is_one_segment() -> None:
    """The parts and the gaps between them are one segment, each byte at its place in the file."""
    memory = FileMemory("file", 10_000)
    first, second = memory.take(100, 200, 4), memory.take(5000, 9000, 8)
    (segment,) = memory.image("file").segments
    assert segment.length == 10_000
    assert segment.memory.ctypes.data % linux.PAGE == 0
    begin = segment.memory.ctypes.data
    assert [part.ctypes.data - begin for part in (first, second)] == [100, 5000]


def test_image_with_parts_apart() -> None:
    """A part whose place does not fit its unit gets memory of its own, and the image continues
    there. So does a part before an earlier one: the end of a run frees all the pages between its
    parts."""
    memory = FileMemory("file", 30)
    parts = [memory.take(20, 28, 8), memory.take(8, 16, 8), memory.take(17, 19, 2)]
    image = memory.image("file")
    image.scatter(0, 30, np.arange(30, dtype=np.uint8))
    assert [part.tolist() for part in parts] == [[*range(20, 28)], [*range(8, 16)], [17, 18]]
    assert [s.length for s in image.segments] == [17, 2, 1, 8, 2]
    memory = FileMemory("file", 4 * linux.PAGE)
    first, last = memory.take(0, 10, 1), memory.take(3 * linux.PAGE, 4 * linux.PAGE, 1)
    between = memory.take(linux.PAGE, 2 * linux.PAGE, 1)
    image = memory.image("file")
    image.scatter(0, image.size_bytes, np.full(image.size_bytes, 7, np.uint8))
    assert (first == 7).all()
    del first, last
    assert (between == 7).all()


_SIZE = 9 * linux.PAGE
_PLACES = st.lists(st.integers(0, _SIZE), min_size=2, max_size=7, unique=True).map(sorted)


@given(_PLACES, st.integers(1, 4 * linux.PAGE), st.data())
def test_a_run_frees_its_whole_pages_only(
    places: list[int], run_bytes: int, data: st.DataObject
) -> None:
    """With its last part a run frees the pages that are all its own. Every other byte stays."""
    parts: dict[int, np.ndarray] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_memory, "RUN_BYTES", run_bytes)
        memory = FileMemory("file", _SIZE)
        for number, (begin, end) in enumerate(itertools.pairwise(places)):
            if data.draw(st.booleans()):  # the others are gaps, as between records of a zip file
                parts[number] = memory.take(begin, end, 1)
        (segment,) = memory.image("file").segments
    whole = segment.memory
    whole[:] = 7
    kept = data.draw(st.sets(st.sampled_from(sorted(parts)))) if parts else set()
    runs: list[list[int]] = []
    for number in parts:
        if not runs or places[number + 1] - places[runs[-1][0]] > run_bytes:
            runs.append([])
        runs[-1].append(number)
    for number in parts.keys() - kept:
        del parts[number]
    wanted = np.full(_SIZE, 7, np.uint8)
    for run in runs:
        if not kept.intersection(run):
            first = -(-places[run[0]] // linux.PAGE) * linux.PAGE
            last = places[run[-1] + 1] // linux.PAGE * linux.PAGE
            wanted[first : max(first, last)] = 0
    assert np.array_equal(whole, wanted)


def test_few_calls_for_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors share a run: one call of the kernel frees up to 256 KiB."""
    state = {f"w{n}": torch.full((2_500,), float(n)) for n in range(300)}
    safetensors.torch.save_file(state, tmp_path / "model")
    calls: list[int] = []
    monkeypatch.setattr(linux, "give_up_pages", lambda _, length: calls.append(length))
    found, _ = our_safetensors.load("model", tmp_path, make("buffered"))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    del found
    assert sum(calls) == 300 * 10_000
    assert len(calls) == -(-300 // (file_memory.RUN_BYTES // 10_000))


def test_the_collector_is_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While many tensors are made; not after that, and not if it was off before."""
    take, seen = FileMemory.take, list[bool]()

    def noted(memory: FileMemory, start: int, stop: int, unit: int) -> object:
        seen.append(gc.isenabled())
        return take(memory, start, stop, unit)

    monkeypatch.setattr(FileMemory, "take", noted)
    _save_safetensors(tmp_path / "model")
    our_safetensors.load("model", tmp_path, make("buffered"))
    assert seen
    assert not any(seen)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused():
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        our_safetensors.load("model", tmp_path, make("buffered"))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_all_memory_goes_with_the_last_tensor(load: Load, tmp_path: Path) -> None:
    """Only the last dropped tensor frees the mapping."""

    def mapped(address: int) -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in lines]
        return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)

    found, transfer = load("model", tmp_path, make("buffered"))
    del transfer
    address = found["c"].data_ptr()
    assert mapped(address)
    last = found.pop("b")
    found.clear()
    assert mapped(last.data_ptr())
    assert mapped(address)
    del last
    assert not mapped(address)


def test_more_than_there_is() -> None:
    """A file larger than memory is one line that names it."""
    with pytest.raises(TransferError, match="making room in memory") as caught:
        FileMemory("huge.pt", 1 << 60)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOMEM, "huge.pt")


def test_a_child_that_is_forked_in_a_pause() -> None:
    """It has the collector on: the thread that would resume it may be missing there."""
    with collector_paused():
        assert not gc.isenabled()
        if (child := os.fork()) == 0:
            os._exit(gc.isenabled())
        assert not gc.isenabled()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert gc.isenabled()
    with collector_paused(), collector_paused():
        pass
    gc.disable()
    try:
        if (child := os.fork()) == 0:
            os._exit(gc.isenabled())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        gc.enable()


def test_a_pause_that_another_thread_begins_meanwhile() -> None:
    """Both are counted, and none is left at the end."""

    def pause() -> None:
        with collector_paused():
            pass

    def check(enter: Callable[..., bool]) -> bool:
        other = collector_paused()
        there = enter(pause, other.__enter__)
        if there:
            other.__exit__(None, None, None)
        assert not collector._pauses
        assert gc.isenabled()
        return there

    everywhere(collector, check)
