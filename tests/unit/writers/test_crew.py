"""Crew: blocks written in the background, failures told in the foreground."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from iobench.testing import Footprint, content
from iobench.writers import crew as module
from iobench.writers.crew import ThreadCrew
from iobench.writers.image import Bytes
from iobench.writers.transfer import Meter, PathCount
from iobench.writers.workers import BlockPool

_Impatience = Callable[[threading.Event], AbstractContextManager[None]]

_BLOCK = 4096


class _Pool(BlockPool):
    """Blocks of one page, counted while they are out."""

    out = most = 0

    def take(self) -> Bytes:
        block = super().take()
        self.out += 1
        self.most = max(self.most, self.out)
        return block

    def give(self, block: Bytes) -> None:
        self.out -= 1
        super().give(block)


@pytest.fixture
def pool() -> _Pool:
    return _Pool(_BLOCK)


def _submit(crew: ThreadCrew, pool: BlockPool, numbers: range) -> None:
    for number in numbers:
        block = pool.take()
        block[:] = content(_BLOCK, number)
        crew.submit(block, number * _BLOCK)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_block_is_written_in_its_place(fd: int, pool: BlockPool, threads: int) -> None:
    """Settled, all bytes are where they belong; dismissed, no thread is left and all is counted."""
    with Footprint.unchanged():
        crew, meter = ThreadCrew(fd, pool=pool, threads=threads, alignment=512), Meter()
        _submit(crew, pool, range(20))
        crew.settle()
        wanted = b"".join(content(_BLOCK, number).tobytes() for number in range(20))
        assert os.pread(fd, 1 << 20, 0) == wanted
        _submit(crew, pool, range(20, 21))
        crew.dismiss(meter)
    assert meter.paths == {"direct": PathCount(operations=21, bytes=21 * _BLOCK)}


def test_blocks_are_bounded(fd: int, pool: _Pool) -> None:
    """No more than threads + 1 blocks are ever in flight, and all come back to the pool."""
    crew = ThreadCrew(fd, pool=pool, threads=2, alignment=512)
    _submit(crew, pool, range(50))
    crew.dismiss(Meter())
    assert 1 <= pool.most <= 4
    assert pool.out == 0


def test_an_idle_crew_has_no_threads(fd: int, pool: BlockPool) -> None:
    """Threads start with the first block, so small files cost none."""
    before = threading.active_count()
    crew = ThreadCrew(fd, pool=pool, threads=2, alignment=512)
    crew.settle()
    assert threading.active_count() == before
    crew.dismiss(Meter())


def _failing(after: int) -> Callable[..., int]:
    lock, count = threading.Lock(), [0]

    def write(fd: int, data: object, offset: int, alignment: int) -> int:
        with lock:
            count[0] += 1
            if count[0] > after:
                raise OSError(errno.EIO, "I/O error")
        return 1

    return write


def test_a_failure_is_raised_by_settle_and_submit(
    fd: int, pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure of a block that nobody waited for is raised at the next call, and at each."""
    monkeypatch.setattr(module, "pwrite_direct", _failing(after=0))
    crew = ThreadCrew(fd, pool=pool, threads=2, alignment=512)
    _submit(crew, pool, range(1))
    for _ in range(2):
        with pytest.raises(OSError, match="I/O error"):
            crew.settle()
    with pytest.raises(OSError, match="I/O error"):
        crew.submit(pool.take(), 0)
    crew.dismiss(Meter())


def test_after_a_failure_nothing_is_written(
    fd: int, pool: _Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that wait behind a failed one are given back unwritten."""
    written: list[int] = []
    hold = threading.Event()

    def write(fd: int, data: object, offset: int, alignment: int) -> int:
        written.append(offset)
        assert hold.wait(10)
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(module, "pwrite_direct", write)
    crew = ThreadCrew(fd, pool=pool, threads=1, alignment=512)
    _submit(crew, pool, range(2))
    hold.set()
    with pytest.raises(OSError, match="I/O error"):
        crew.settle()
    crew.dismiss(Meter())
    assert written == [0]
    assert (pool.most, pool.out) == (2, 0)


def test_ctrl_c_while_the_threads_end(
    fd: int,
    pool: _Pool,
    monkeypatch: pytest.MonkeyPatch,
    impatience: _Impatience,
) -> None:
    """It is raised once they have ended; dropped, what waited in the queue is never written."""
    written: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def write(fd: int, data: object, offset: int, alignment: int) -> int:
        begun.set()
        assert go_on.wait(10)
        written.append(offset)
        return 1

    monkeypatch.setattr(module, "pwrite_direct", write)
    crew = ThreadCrew(fd, pool=pool, threads=1, alignment=512)
    with Footprint.unchanged():
        _submit(crew, pool, range(2))
        assert begun.wait(10)
        with impatience(go_on):
            crew.dismiss(Meter(), drop=True)
    assert written == [0]
    assert pool.out == 0


@pytest.mark.parametrize("starts", [True, False])
def test_a_start_that_is_interrupted_or_fails(
    fd: int, pool: BlockPool, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    """The crew knows of a thread that runs all the same, and waits for none that does not."""
    start = threading.Thread.start

    def broken(thread: threading.Thread) -> None:
        if not starts:
            raise RuntimeError("can't start new thread")
        start(thread)
        raise KeyboardInterrupt

    crew = ThreadCrew(fd, pool=pool, threads=2, alignment=512)
    with Footprint.unchanged():
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", broken)
            with pytest.raises(KeyboardInterrupt if starts else RuntimeError):
                crew.submit(pool.take(), 0)
        crew.dismiss(Meter(), drop=True)
