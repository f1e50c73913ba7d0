"""RingCrew: a failure is known before anybody can take a dropped block for written."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from iobench.testing import Footprint, content
from iobench.writers import flight as flights
from iobench.writers.flight import InFlight
from iobench.writers.ring_crew import RingCrew
from iobench.writers.transfer import Meter, PathCount
from iobench.writers.workers import BlockPool

_Impatience = Callable[[threading.Event], AbstractContextManager[None]]

_BLOCK = 4096


class _Ring:
    """Ends operations in the order they came; the `nth` with an errno, or by breaking."""

    def __init__(self, fd: int, nth: int = 1000, *, breaks: bool = False) -> None:
        self._fd, self._left, self._breaks = fd, nth, breaks
        self._queued: list[tuple[int, int, int]] = []

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._queued.append((tag, length, offset))

    read = write

    def wait(self) -> tuple[int, int]:
        self._left -= 1
        if self._left < 0 and self._breaks:
            raise OSError(errno.EBADF, "Bad file descriptor")
        tag, length, offset = self._queued.pop(0)
        if self._left == -1:
            return tag, -errno.EIO
        os.pwrite(self._fd, content(length, offset // length), offset)
        return tag, length

    def peek(self) -> None:
        """Nothing ends before somebody waits for it."""

    def close(self) -> None:
        pass


@pytest.fixture
def pool() -> BlockPool:
    """Blocks of one page."""
    return BlockPool(_BLOCK)


def _crew(fd: int, pool: BlockPool, ring: _Ring) -> RingCrew:
    def make_flight(meter: Meter) -> InFlight:
        return InFlight(ring, fd, writes=True, alignment=512, path="fake", meter=meter)

    return RingCrew(fd, pool=pool, iodepth=4, make_flight=make_flight)


def _submit(crew: RingCrew, pool: BlockPool, numbers: range) -> None:
    for number in numbers:
        crew.submit(pool.take(), number * _BLOCK)


def test_every_block_is_written(fd: int, pool: BlockPool) -> None:
    """Settled, everything is there; a block that is put stays the caller's; all is counted."""
    crew, meter, kept = _crew(fd, pool, _Ring(fd)), Meter(), pool.take()
    with Footprint.unchanged():
        _submit(crew, pool, range(20))
        crew.settle()
        assert os.fstat(fd).st_size == 20 * _BLOCK
        crew.put(kept, 20 * _BLOCK, Meter())
        crew.dismiss(meter)
    assert meter.paths == {"fake": PathCount(operations=21, bytes=21 * _BLOCK)}
    assert all(block is not kept for block in pool._free)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("nth", [0, 3, 9])
def test_a_failure_is_never_overtaken(
    fd: int, pool: BlockPool, monkeypatch: pytest.MonkeyPatch, nth: int, breaks: bool
) -> None:
    """settle raises what a write raised, however early it waits, and the thread can be ended."""
    monkeypatch.setattr(flights, "_lost", [])
    for _ in range(30):
        crew = _crew(fd, pool, _Ring(fd, nth, breaks=breaks))
        with pytest.raises(OSError, match=r"error|descriptor"):
            _submit_and_settle(crew, pool)
        with pytest.raises(OSError, match=r"error|descriptor"):
            crew.submit(pool.take(), 0)
        crew.dismiss(Meter())
    assert not any(t.name == "iobench-crew" for t in threading.enumerate())


def _submit_and_settle(crew: RingCrew, pool: BlockPool) -> None:
    _submit(crew, pool, range(10))
    crew.settle()


def test_no_ring(fd: int, pool: BlockPool) -> None:
    """A ring that cannot be had is a failure as any other."""

    def make_flight(meter: Meter) -> InFlight:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    crew = RingCrew(fd, pool=pool, iodepth=2, make_flight=make_flight)
    with pytest.raises(OSError, match="Cannot allocate"):
        _submit_and_settle(crew, pool)
    crew.dismiss(Meter())


class _SlowRing(_Ring):
    """Nothing ends before the test says so."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.waits, self.go_on = threading.Event(), threading.Event()

    def wait(self) -> tuple[int, int]:
        self.waits.set()
        assert self.go_on.wait(10)
        return super().wait()


def test_ctrl_c_while_the_thread_ends(fd: int, pool: BlockPool, impatience: _Impatience) -> None:
    """It is raised once what was in flight has landed; what waited in the queue is dropped."""
    crew = _crew(fd, pool, ring := _SlowRing(fd))
    with Footprint.unchanged():
        _submit(crew, pool, range(1))
        assert ring.waits.wait(10)
        _submit(crew, pool, range(1, 3))
        with impatience(ring.go_on):
            crew.dismiss(Meter(), drop=True)
    assert os.fstat(fd).st_size == _BLOCK
    crew.settle()  # all permits came back
