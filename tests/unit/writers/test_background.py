"""BackgroundSink: blocks written in the background, failures raised in the foreground."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import cast

import numpy as np
import pytest
from support.counted_pool import CountedPool

from iobench.linux import DioAlignment
from iobench.testing import Footprint, content
from iobench.writers.blocks import channel
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.direct import engine as direct_engine
from iobench.writers.direct.background import BackgroundSink
from iobench.writers.direct.engine import (
    BlockingEngine,
    DirectEngine,
    OnComplete,
    RingEngine,
    ignore,
)
from iobench.writers.image import Bytes, Extent
from iobench.writers.local.direct_file import DirectFile
from iobench.writers.s3 import PartSink
from iobench.writers.s3_store.parts import StreamParts
from iobench.writers.s3_store.upload import S3Upload
from iobench.writers.transfer import Meter

_Impatience = Callable[[threading.Event], AbstractContextManager[None]]

_BLOCK = 4096


@pytest.fixture
def pool() -> CountedPool:
    return CountedPool(_BLOCK)


class _PathFile:
    """Takes the place of a PathFile: every range goes to the engine."""

    def __init__(self, fd: int) -> None:
        self._direct = DirectFile(fd=fd, alignment=DioAlignment(memory=512, offset=512))

    def write(self, part: Extent, engine: DirectEngine, done: OnComplete = ignore) -> None:
        engine.write(self._direct, part, done)

    def close(self) -> None:
        pass


def _background(
    fd: int,
    pool: BlockPool,
    depth: int,
    engine: Callable[[Meter], DirectEngine],
    meter: Meter | None = None,
    *,
    ring: bool,
) -> BackgroundSink:
    file = _PathFile(fd)
    return BackgroundSink(file, pool, depth, engine, meter or Meter(), ring=ring)


def _by_threads(
    fd: int, pool: BlockPool, threads: int, meter: Meter | None = None
) -> BackgroundSink:
    def engine(meter: Meter) -> DirectEngine:
        return BlockingEngine(pool, meter, path="direct")

    return _background(fd, pool, threads, engine, meter, ring=False)


_NONE = np.empty(0, dtype=np.uint8)


def _drain(sink: BackgroundSink) -> None:
    sink.drain(_NONE, 0, 0, last=False)


def _release(sink: BackgroundSink, *, failed: bool = False) -> None:
    sink.release(_NONE, failed=failed)


def _submit(writer: BackgroundSink, pool: BlockPool, numbers: range) -> None:
    for number in numbers:
        block = pool.take()
        block[:] = content(_BLOCK, number)
        writer.put(block, number * _BLOCK)


def test_blocks_are_bounded(fd: int, pool: CountedPool) -> None:
    """At most threads + 1 blocks are in flight, and all return to the pool."""
    writer = _by_threads(fd, pool, 2)
    _submit(writer, pool, range(50))
    _release(writer)
    assert 1 <= pool.most <= 4
    assert not pool.out


class _Ring:
    """Completes operations in order; the `nth` with an errno, or with an error of the ring."""

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

    def close(self) -> None:
        pass


def _by_ring(fd: int, pool: BlockPool, ring: _Ring, meter: Meter | None = None) -> BackgroundSink:
    def engine(meter: Meter) -> DirectEngine:
        return RingEngine(ring, 4, pool, meter, path="fake")

    return _background(fd, pool, 4, engine, meter, ring=True)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("nth", [0, 3, 9])
def test_a_failure_is_never_overtaken(
    fd: int, pool: BlockPool, monkeypatch: pytest.MonkeyPatch, nth: int, breaks: bool
) -> None:
    """drain raises the failure of a write, however early it waits, and the thread can end.

    Memory that the kernel may still use after the failure of a ring is not in the pool.
    """
    lost: list[Bytes] = []
    monkeypatch.setattr(direct_engine, "_lost", lost)
    monkeypatch.setattr(channel, "_lost", [])
    for _ in range(30):
        writer = _by_ring(fd, pool, _Ring(fd, nth, breaks=breaks))
        with pytest.raises(OSError, match=r"error|descriptor"):
            _submit_and_drain(writer, pool)
        with pytest.raises(OSError, match=r"error|descriptor"):
            writer.put(pool.take(), 0)
        _release(writer)
    assert not any(t.name == "iobench-background" for t in threading.enumerate())
    assert bool(lost) == breaks
    assert not {block.ctypes.data for block in pool._free} & {one.ctypes.data for one in lost}


def _submit_and_drain(writer: BackgroundSink, pool: BlockPool) -> None:
    _submit(writer, pool, range(10))
    _drain(writer)


class _SlowRing(_Ring):
    """No operation completes before the test permits it."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.waits, self.go_on = threading.Event(), threading.Event()

    def wait(self) -> tuple[int, int]:
        self.waits.set()
        assert self.go_on.wait(10)
        return super().wait()


def test_ctrl_c_while_the_rings_thread_ends(
    fd: int, pool: BlockPool, impatience: _Impatience
) -> None:
    """It is raised once blocks in flight are complete; queued blocks are dropped."""
    writer = _by_ring(fd, pool, ring := _SlowRing(fd))
    with Footprint.unchanged():
        _submit(writer, pool, range(1))
        assert ring.waits.wait(10)
        _submit(writer, pool, range(1, 3))
        with impatience(ring.go_on):
            _release(writer, failed=True)
    assert os.fstat(fd).st_size == _BLOCK
    _drain(writer)  # all permits came back


def test_release_in_one_of_its_threads(fd: int, pool: BlockPool) -> None:
    """There the collector drops the stream: nothing is added up while the threads still count."""
    meter, released = Meter(), threading.Event()

    class File(_PathFile):
        def write(self, part: Extent, engine: DirectEngine, done: OnComplete) -> None:
            super().write(part, engine, done)
            if not released.is_set():
                _release(writer, failed=True)
                released.set()

    def engine(meter: Meter) -> DirectEngine:
        return BlockingEngine(pool, meter, path="direct")

    writer = BackgroundSink(File(fd), pool, 1, engine, meter, ring=False)
    _submit(writer, pool, range(1))
    assert released.wait(10)
    assert meter.paths == {}


def test_release_of_an_upload_in_one_of_its_threads() -> None:
    """The same for the parts of an object."""
    released, meter = threading.Event(), Meter()

    class Upload:
        begun, stop = True, threading.Event()

        def send(self, _: int, views: list[Bytes], own: Meter) -> None:
            own.count("part upload", len(views[0]))
            sink.release(_NONE, failed=True)
            released.set()

    parts = StreamParts(first_bytes=_BLOCK)
    sink = PartSink(cast(S3Upload, Upload()), "s3://b/k", meter, parts=parts, threads=2)
    sink.put(np.zeros(_BLOCK, dtype=np.uint8), 0)
    assert released.wait(10)
    assert meter.paths == {}
