"""Reads into fresh memory: pages are made ahead of them, and small pages go by blocks."""

from __future__ import annotations

import ctypes
import errno
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch

from iobench import linux
from iobench.bench.data.sliced_files import SliceImage
from iobench.formats import safetensors
from iobench.formats.tensor_slices import CutImage, CutPart, spans
from iobench.units import MIB
from iobench.writers.blocks import workers
from iobench.writers.blocks.pages import HUGE_PAGE, fresh_pages, in_huge_pages
from iobench.writers.blocks.workers import BlockPool, faulted_ahead
from iobench.writers.image import Bytes, FileImage
from iobench.writers.local import direct_file
from iobench.writers.registry import make


@pytest.fixture
def lead(monkeypatch: pytest.MonkeyPatch) -> int:
    """A short lead, so that the small images of these tests have one too."""
    monkeypatch.setattr(workers, "LEAD_BYTES", 4 * HUGE_PAGE)
    return 4 * HUGE_PAGE


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert not any(t.name == "iobench-fault-ahead" for t in threading.enumerate())


def ahead(*parts: Bytes) -> AbstractContextManager[None]:
    """Prefault for a read of all of them."""
    return faulted_ahead([(FileImage.of("file", parts), [(0, sum(map(len, parts)))])])


def pages(memory: Bytes) -> list[bool]:
    """Whether each huge page of the memory has its last small page."""
    begin = memory.ctypes.data
    ends = range(begin + HUGE_PAGE - 1, begin + len(memory), HUGE_PAGE)
    return [linux.has_page(end) for end in ends]


def wait_for(memory: Bytes, first: int) -> None:
    deadline = time.monotonic() + 60
    while not all(pages(memory)[first:]):
        assert time.monotonic() < deadline, pages(memory)
        time.sleep(0.001)


def test_pages_appear_beyond_the_lead(lead: int) -> None:
    """All whole huge pages after the lead get pages, and all bytes are zero."""
    memory = fresh_pages(16 * HUGE_PAGE + 99, huge=False)
    with ahead(memory):
        wait_for(memory, lead // HUGE_PAGE)
    assert pages(memory) == [False] * 4 + [True] * 12
    assert not memory.any()


def test_it_skips_what_the_read_has_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """If pages exist already, it continues a lead further and skips those between."""
    monkeypatch.setattr(workers, "LEAD_BYTES", 8 * HUGE_PAGE)
    memory = fresh_pages(24 * HUGE_PAGE, huge=False)
    memory[12 * HUGE_PAGE - 1] = 1  # the last page of the first stretch beyond the lead
    with ahead(memory):
        wait_for(memory, 16)
    assert pages(memory) == [False] * 11 + [True] + [False] * 4 + [True] * 8


@pytest.mark.usefixtures("lead")
def test_ranges_of_a_file() -> None:
    """The lead counts what is read, also in files before; memory between ranges gets no pages."""
    parts = [fresh_pages(8 * HUGE_PAGE, huge=False) for _ in range(3)]
    image = FileImage.of("file", parts)
    edges = [(0, 2), (8, 13), (20, 24)]
    ranges = [(start * HUGE_PAGE, stop * HUGE_PAGE) for start, stop in edges]
    other = fresh_pages(4 * HUGE_PAGE, huge=False)
    with faulted_ahead([(image, ranges), (FileImage.of("next", [other]), [(0, len(other))])]):
        wait_for(other, 0)
        wait_for(parts[2], 4)
        wait_for(parts[1][: 5 * HUGE_PAGE], 4)
    assert [pages(one) for one in parts] == [
        [False] * 8,
        [False] * 4 + [True] + [False] * 3,
        [False] * 4 + [True] * 4,
    ]


@pytest.mark.parametrize("sliced", [False, True])
def test_columns_of_a_file(lead: int, sliced: bool) -> None:
    """A cut by columns has less memory than its part of the file has bytes: all of it gets pages.

    Also if the file is read in slices, each of which ends within a part.
    """
    whole = torch.empty(2048, 32 * HUGE_PAGE // 2048, dtype=torch.uint8, device="meta")
    parts = []
    for number, columns in enumerate(whole.chunk(2, dim=1)):
        memory = fresh_pages(lead * 4, huge=False)
        (span,) = spans(columns)
        into = torch.from_numpy(memory).view(columns.shape)
        parts.append(CutPart(number * whole.numel(), span, into))
    cut = CutImage("file", 2 * whole.numel(), parts)
    ((start, stop),) = cut.ranges
    image = SliceImage(cut, 0, stop, "file") if sliced else cut
    with faulted_ahead([(image, [(start, lead), (lead, stop)])]):
        wait_for(parts[1].memory, 0)


@pytest.mark.usefixtures("lead")
def test_bytes_stay() -> None:
    """Memory with content keeps it, also at unaligned addresses."""
    whole = np.random.default_rng(0).integers(0, 255, 9 * HUGE_PAGE, np.uint8)
    wanted = whole.copy()
    cuts = [0, 1, 5_000, HUGE_PAGE + 7, 6 * HUGE_PAGE - 1, len(whole)]
    parts = [whole[a:b] for a, b in itertools.pairwise(cuts)]
    with ahead(*parts):
        pass
    assert np.array_equal(whole, wanted)


@pytest.mark.usefixtures("lead")
def test_a_read_that_fails_ends_it() -> None:
    memory = fresh_pages(512 * MIB, huge=False)
    with pytest.raises(RuntimeError, match="the read"), ahead(memory):
        raise RuntimeError("the read")


@pytest.mark.usefixtures("lead")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM])
def test_a_kernel_without_populate(
    code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before Linux 5.14, or without memory, it ends and the read continues."""

    def refuse(address: int, length: int) -> None:
        tried.append(length)
        raise OSError(code, "no")

    tried: list[int] = []
    monkeypatch.setattr(linux, "populate", refuse)
    state = {"a": torch.arange(16 * HUGE_PAGE // 8)}
    writer = make("odirect")
    if not writer.available(tmp_path).ok:
        pytest.skip("no O_DIRECT")
    safetensors.save(state, "file", tmp_path, writer)
    found, _ = safetensors.load("file", tmp_path, writer)
    assert torch.equal(found["a"], state["a"])
    assert len(tried) <= 1


@pytest.mark.usefixtures("lead")
def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body still runs, once, and its exception is raised."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    memory = fresh_pages(16 * HUGE_PAGE, huge=False)
    with ahead(memory):
        memory[:] = 1
    assert memory.all()
    with pytest.raises(ValueError, match="the read"), ahead(memory):
        raise ValueError("the read")


@pytest.mark.usefixtures("lead")
@pytest.mark.parametrize("given_back", [False, True])
def test_the_size_of_the_pages(given_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Huge pages, but small ones on a host that takes free memory; later ones may be huge."""
    advised: list[bool] = []
    advise = linux.advise_huge

    def noted(address: int, length: int, *, huge: bool) -> None:
        advised.append(huge)
        advise(address, length, huge=huge)

    monkeypatch.setattr(workers, "host_takes_free_memory", lambda: given_back)
    monkeypatch.setattr(linux, "advise_huge", noted)
    memory = fresh_pages(16 * HUGE_PAGE, huge=False)
    with ahead(memory):
        wait_for(memory, 4)
    assert advised == [not given_back] * 3 + [True] * 3
    assert not memory.any()


def test_has_page() -> None:
    """True for memory that was touched, false for other memory, an error without a mapping."""
    memory = fresh_pages(4 * linux.PAGE, huge=False)
    memory[linux.PAGE + 5] = 1
    begin = memory.ctypes.data
    assert [linux.has_page(begin + n * linux.PAGE) for n in range(4)] == [False, True, False, False]
    with pytest.raises(OSError, match="memory") as caught:
        linux.has_page(ctypes.c_size_t(-linux.PAGE).value)
    assert caught.value.errno == errno.ENOMEM


_SIZE = 5 * MIB + 123


def test_in_huge_pages() -> None:
    """Parts of the memory count too; other memory does not."""
    memory = fresh_pages(8 * MIB, huge=True)
    assert in_huge_pages(memory)
    assert in_huge_pages(memory[MIB:][:MIB].view(np.uint8))
    assert not in_huge_pages(fresh_pages(8 * MIB, huge=False))
    assert not in_huge_pages(np.zeros(MIB, np.uint8))


@pytest.mark.parametrize("huge", [False, True])
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("name", ["odirect", "uring", "hybrid"])
def test_reads(
    name: str, slow: bool, huge: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are right in any case. Small pages are filled by a copy only where it pays."""
    writer = make(name, block_size="1MiB")
    answer = writer.available(tmp_path)
    if not answer.ok:
        pytest.skip(answer.reason)
    data = np.random.default_rng(1).integers(0, 256, _SIZE, dtype=np.uint8)
    writer.write(FileImage.of("f", [data]), tmp_path)
    monkeypatch.setattr(direct_file, "host_takes_free_memory", lambda: slow)
    taken, take = [], BlockPool.take
    monkeypatch.setattr(BlockPool, "take", lambda pool: taken.append(1) or take(pool))
    memory = fresh_pages(_SIZE, huge=huge)
    writer.read(FileImage.of("f", [memory]), tmp_path)
    assert np.array_equal(memory, data)
    if slow and not huge:
        assert len(taken) >= _SIZE // MIB
    else:
        assert len(taken) <= 1  # for the tail
