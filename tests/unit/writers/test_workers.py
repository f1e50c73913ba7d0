"""run_workers: blocks are shared, failures are raised, no thread is left."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reentry import at_every_collection

from iobench.writers.base import Writer
from iobench.writers.blocks.interrupt_safe import Worker
from iobench.writers.blocks.pages import HUGE_PAGE
from iobench.writers.blocks.workers import BlockPool, Blocks, run_workers
from iobench.writers.hybrid import HybridWriter
from iobench.writers.image import Bytes, FileImage
from iobench.writers.odirect import ODirectWriter
from iobench.writers.transfer import Meter
from iobench.writers.uring import UringWriter

_Impatience = Callable[[threading.Event], AbstractContextManager[None]]


class _WorkerError(Exception):
    pass


def test_blocks_while_the_garbage_collector_runs() -> None:
    """Another thread takes blocks in the middle of a step: none is lost or mixed."""

    def check() -> tuple[Callable[[], object], Callable[[], object]]:
        blocks = Blocks([(0, 5), (7, 12)], 1)
        others, taken = iter(blocks), list[tuple[int, int]]()

        def take() -> None:
            own = list(blocks)
            expected = [(one, one + 1) for one in (*range(5), *range(7, 12))]
            assert sorted(own + taken) == expected

        return take, lambda: taken.extend(islice(others, 3))

    at_every_collection(check)


@given(
    st.lists(st.integers(0, 300), unique=True, max_size=9).map(sorted),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_blocks_of_ranges(edges: list[int], unit: int, units: int) -> None:
    """Together they are the ranges; those after the first of a range begin at a unit."""
    ranges, size = list(zip(edges[::2], edges[1::2], strict=False)), unit * units
    blocks = Blocks(ranges, size, unit)
    count, found = blocks.count, list(blocks)
    assert count == len(found)
    assert [at for a, b in found for at in range(a, b)] == [
        at for a, b in ranges for at in range(a, b)
    ]
    starts = {start for start, _ in ranges}
    assert all(begin in starts or begin % unit == 0 for begin, _ in found)
    assert all(end - (begin - begin % unit) <= size for begin, end in found)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_each_block_goes_to_one_worker(threads: int) -> None:
    """With any number of workers, every block is taken exactly once, and all is counted."""
    taken: list[tuple[int, int]] = []
    meter = Meter()

    def work(blocks: Blocks, own: Meter) -> None:
        for begin, end in blocks:
            taken.append((begin, end))
            own.count("path", end - begin)

    run_workers(threads, Blocks([(0, 1001)], 10), work, meter)
    assert sorted(taken) == list(Blocks([(0, 1001)], 10))
    assert meter.paths["path"].bytes == 1001


@pytest.mark.parametrize("in_helper", [False, True])
def test_a_failure_cancels_the_rest_and_is_raised(in_helper: bool) -> None:
    """If any worker fails, no more blocks are yielded, and the caller gets the failure."""
    caller = threading.current_thread()
    failed = threading.Event()
    many = 1_000_000
    taken: list[int] = []

    def work(blocks: Blocks, own: Meter) -> None:
        if (threading.current_thread() is not caller) == in_helper:
            next(iter(blocks))
            failed.set()
            raise _WorkerError
        assert failed.wait(10)
        taken.append(sum(1 for _ in islice(blocks, many)))

    with pytest.raises(_WorkerError):
        run_workers(2, Blocks([(0, 2 * many)], 1), work, Meter())
    assert taken[0] < many
    assert _helpers() == []


@pytest.mark.parametrize("apart", [False, True])
def test_workers_without_failure_cancel_nothing(apart: bool) -> None:
    """Cancelling ends the retries of an S3 part: a worker that ends first must not do it."""
    cancelled: list[bool] = []

    class Watched(Blocks):
        def cancel(self) -> None:
            cancelled.append(True)

    run_workers(
        2, Watched([(0, 2)], 1), lambda blocks, _: [*blocks].clear(), Meter(), caller_waits=apart
    )
    assert not cancelled


def test_further_failures_are_notes() -> None:
    """The first of several failures is raised, with the others as its notes."""
    barrier = threading.Barrier(3)

    def work(blocks: Blocks, own: Meter) -> None:
        barrier.wait(10)
        raise _WorkerError

    with pytest.raises(_WorkerError) as caught:
        run_workers(3, Blocks([(0, 10)], 1), work, Meter())
    assert len(caught.value.__notes__) == 2


def test_ctrl_c_while_working_stops_the_helpers() -> None:
    """KeyboardInterrupt in the caller's own work cancels the helpers and waits for their end."""
    caller = threading.current_thread()
    ended = threading.Event()

    def work(blocks: Blocks, own: Meter) -> None:
        if threading.current_thread() is caller:
            raise KeyboardInterrupt
        for _ in blocks:
            pass
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        run_workers(2, Blocks([(0, 1 << 60)], 1), work, Meter())
    assert ended.is_set()
    assert _helpers() == []


@pytest.mark.parametrize("caller_waits", [False, True])
def test_ctrl_c_while_waiting_waits_on(impatience: _Impatience, caller_waits: bool) -> None:
    """KeyboardInterrupt while the caller waits for a helper is raised once the helper has ended."""
    caller = threading.current_thread()
    go_on = threading.Event()
    ended: list[bool] = []

    def work(blocks: Blocks, own: Meter) -> None:
        if threading.current_thread() is not caller:
            assert go_on.wait(10)
            ended.append(True)

    with impatience(go_on):
        threads = 1 if caller_waits else 2
        run_workers(threads, Blocks([(0, 10)], 1), work, Meter(), caller_waits=caller_waits)
    assert ended == [True]


def test_a_helper_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a thread cannot start, the others end and the error is raised."""
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def limited(self: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    def work(blocks: Blocks, own: Meter) -> None:
        for _ in blocks:
            pass

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start"):
        run_workers(3, Blocks([(0, 1 << 60)], 1), work, Meter())
    assert _helpers() == []


@pytest.mark.parametrize("size", [64 << 10, 2 << 20, 5 << 20])
def test_what_a_burst_took_is_freed(size: int) -> None:
    """What one operation needs stays, and no block is there twice."""
    pool = BlockPool(size, keep=3)
    for _ in range(2):
        burst = [pool.take() for _ in range(24)]
        freed = [weakref.ref(block.base) for block in burst]
        while burst:
            pool.give(burst.pop())
        assert len(pool._free) <= max(3, HUGE_PAGE // size)
        assert sum(ref() is not None for ref in freed) <= max(3, 2 * HUGE_PAGE // size)
        assert len({pool.take().ctypes.data for _ in range(3)}) == 3


@pytest.mark.parametrize(
    "writer",
    [
        HybridWriter(block_size="128KiB", iodepth=3),
        HybridWriter(block_size="4MiB", iodepth=2),
        HybridWriter(block_size="128KiB", iodepth=3, uring=False),
        ODirectWriter(block_size="128KiB", threads=3),
        UringWriter(block_size="128KiB", iodepth=5, rings=2),
    ],
    ids=repr,
)
def test_one_operation_needs_no_more_than_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, writer: Writer
) -> None:
    """Otherwise each save would make new memory."""
    if not (found := writer.available(tmp_path)).ok or found.reason:
        pytest.skip(found.reason)
    take, give = BlockPool.take, BlockPool.give
    out, most = Counter[BlockPool](), Counter[BlockPool]()

    def counted(pool: BlockPool) -> Bytes:
        out[pool] += 1
        most[pool] = max(most[pool], out[pool])
        return take(pool)

    def given(pool: BlockPool, block: Bytes) -> None:
        out[pool] -= 1
        give(pool, block)

    monkeypatch.setattr(BlockPool, "take", counted)
    monkeypatch.setattr(BlockPool, "give", given)
    memory = np.zeros((12 << 20) + 8, dtype=np.uint8)[8:]  # not aligned, so all of it is staged
    image = FileImage.of("file", [memory])
    writer.write(image, tmp_path)
    writer.read(image, tmp_path)
    with writer.open(tmp_path / "stream") as stream:
        stream.write(memory)
    assert most
    assert all(pool._keep is not None and count <= pool._keep for pool, count in most.items())


def _helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "iobench-worker"]


@pytest.mark.parametrize("size", [4096, 12288, 1 << 20, (1 << 20) + 4096, 3 << 20])
def test_blocks_are_aligned_and_do_not_overlap(size: int) -> None:
    """Blocks are page-aligned, writable and do not overlap, however many a huge page holds."""
    pool = BlockPool(size)
    blocks = [pool.take() for _ in range((4 << 20) // size + 2)]
    for number, block in enumerate(blocks):
        assert len(block) == size
        assert block.ctypes.data % mmap.PAGESIZE == 0
        block[[0, -1]] = number % 256
    for number, block in enumerate(blocks):
        assert block[0] == block[-1] == number % 256


def test_a_handler_that_ends_the_process_does_not_cut_the_wait_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A SIGTERM handler may raise SystemExit in each wait for a worker that uses the memory."""
    release, ended, exits = threading.Event(), [], iter(range(3))
    join = Worker.join

    def interrupted(worker: Worker, timeout: float | None = None) -> None:
        number = next(exits, None)
        if number is None:
            return join(worker, timeout)
        if number == 2:
            release.set()
        raise SystemExit(number)

    def work(blocks: Blocks, own: Meter) -> None:
        assert release.wait(10)
        ended.append(True)

    monkeypatch.setattr(Worker, "join", interrupted)
    with pytest.raises(SystemExit):
        run_workers(1, Blocks([(0, 1)], 1), work, Meter(), caller_waits=True)
    assert ended == [True]


@pytest.mark.parametrize("caller_waits", [False, True])
def test_without_threads(caller_waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of an interpreter that refuses threads, the caller does all the work."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(Worker, "start", refuse)
    found: list[int] = []
    run_workers(
        3,
        Blocks([(0, 5)], 1),
        lambda blocks, _: found.extend(start for start, _ in blocks),
        Meter(),
        caller_waits=caller_waits,
    )
    assert found == list(range(5))
