"""RingEngine: copies overlap a full queue, every byte is in its place, no block is lost."""

from __future__ import annotations

import ctypes
import errno
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.linux import DioAlignment
from iobench.testing import content
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.direct.engine import RingEngine
from iobench.writers.image import Bytes, Extent, FileImage
from iobench.writers.local.direct_file import DirectFile
from iobench.writers.transfer import Meter

_UNIT = 512
_PIECE = 4096
_FILE = DirectFile(fd=3, alignment=DioAlignment(memory=_UNIT, offset=_UNIT))


class _Ring:
    """A ring over a file in memory; `ready` says how many operations have completed."""

    def __init__(self, file: bytearray, *, fails: int = -1) -> None:
        self.file, self.fails = file, fails
        self.queued: list[tuple[bool, int, int, int, int]] = []
        self.begun, self.most = 0, 0
        self.ready = 0

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._queue(True, address, length, offset, tag)

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._queue(False, address, length, offset, tag)

    def _queue(self, writes: bool, address: int, length: int, offset: int, tag: int) -> None:
        assert address % _UNIT == length % _UNIT == offset % _UNIT == 0
        self.queued.append((writes, address, length, offset, tag))
        self.begun += 1
        self.most = max(self.most, len(self.queued))

    def peek(self) -> tuple[int, int] | None:
        if not self.queued or not self.ready:
            return None
        self.ready -= 1
        return self._end()

    def wait(self) -> tuple[int, int]:
        assert self.queued, "waits for ever"
        return self._end()

    def _end(self) -> tuple[int, int]:
        writes, address, length, offset, tag = self.queued.pop(0)
        self.fails -= 1
        if self.fails == -1:
            return tag, -errno.EIO
        memory = (ctypes.c_char * length).from_address(address)
        if writes:
            self.file[offset : offset + length] = memory[:length]
            return tag, length
        found = bytes(self.file[offset : offset + length])
        memory[: len(found)] = found
        return tag, len(found)

    def close(self) -> None:
        assert not self.queued, "closed with operations in flight"


class _Pool(BlockPool):
    """Counts the blocks that are in use."""

    def __init__(self) -> None:
        super().__init__(_PIECE)
        self.out = self.most_out = 0

    def take(self) -> Bytes:
        self.out += 1
        self.most_out = max(self.most_out, self.out)
        return super().take()

    def give(self, block: Bytes) -> None:
        self.out -= 1
        super().give(block)


def _memory(size: int, *, staged: bool) -> Bytes:
    """Memory that must be copied, or that is aligned."""
    room = fresh_pages(size + _UNIT, huge=False)
    return room[1 : size + 1] if staged else room[:size]


def _engine(ring: _Ring, iodepth: int, pool: BlockPool, *, writes: bool) -> RingEngine:
    return RingEngine(ring, iodepth, pool, Meter(), writes=writes, path="fake")


@given(
    seed=st.integers(0, 9999),
    iodepth=st.integers(1, 9),
    ranges=st.integers(1, 8),
    tail=st.integers(1, 3 * _PIECE),
    staged=st.booleans(),
    writes=st.booleans(),
)
def test_every_byte_is_moved(
    seed: int, iodepth: int, ranges: int, tail: int, staged: bool, writes: bool
) -> None:
    """In any order of completion, operations in flight and blocks in use stay bounded."""
    rng, size = random.Random(seed), 3 * _PIECE
    total = (ranges - 1) * size + tail
    data, memory = content(total, seed), _memory(total, staged=staged)
    image, calls = FileImage.of("image", [memory]), Counter[int]()
    if writes:
        memory[:] = data
    ring, pool = _Ring(bytearray() if writes else bytearray(data.tobytes())), _Pool()
    with _engine(ring, iodepth, pool, writes=writes) as engine:
        for start in range(0, total, size):
            ring.ready = rng.choice([0, 1, iodepth])
            stop = min(start + size, total)

            def ended(whole: bool, at: int = start) -> None:
                calls.update({at: whole})

            if writes:
                engine.write(_FILE, Extent(image, start, stop, start), ended)
            else:
                engine.read(_FILE, Extent(image, start, stop, start), ended)
        engine.drain()
        assert len(engine) == 0
    assert bytes(ring.file[:total] if writes else memory) == data.tobytes()
    assert calls == Counter(dict.fromkeys(range(0, total, size), 1))
    assert ring.most <= iodepth
    assert pool.most_out <= iodepth + max(1, iodepth // 4)
    assert pool.out == 0


def test_the_next_read_starts_before_a_copy() -> None:
    """Four reads complete at once: four more start before two blocks are copied."""
    data, in_flight = content(16 * _PIECE), []

    class Watched(FileImage):
        def scatter(self, start: int, stop: int, block: Bytes) -> int:
            in_flight.append(len(ring.queued))
            return super().scatter(start, stop, block)

    image = Watched.of("image", [_memory(16 * _PIECE, staged=True)])
    ring = _Ring(bytearray(data.tobytes()))
    with _engine(ring, 8, BlockPool(_PIECE), writes=False) as engine:
        engine.read(_FILE, Extent(image, 0, 10 * _PIECE, 0))
        assert (ring.begun, in_flight) == (8, [])
        ring.ready = 4
        engine.read(_FILE, Extent(image, 10 * _PIECE, 16 * _PIECE, 10 * _PIECE))
        assert in_flight[:3] == [6, 7, 8]  # four have gone, the two that waited are under way
        engine.drain()


def test_blocks_are_filled_before_the_queue_has_room() -> None:
    """When a write completes, the next block has been filled already."""
    copied: list[int] = []

    class Watched(FileImage):
        def gather(self, start: int, stop: int, block: Bytes) -> int:
            copied.append(start // _PIECE)
            return super().gather(start, stop, block)

    memory = _memory(16 * _PIECE, staged=True)
    memory[:] = content(len(memory))
    image, ring = Watched.of("image", [memory]), _Ring(bytearray())
    with _engine(ring, 4, BlockPool(_PIECE), writes=True) as engine:
        engine.write(_FILE, Extent(image, 0, 5 * _PIECE, 0))
        assert (ring.begun, copied) == (4, [0, 1, 2, 3, 4])
        engine.wait_one()
        assert (ring.begun, copied) == (5, [0, 1, 2, 3, 4])
        engine.drain()
    assert bytes(ring.file) == memory[: 5 * _PIECE].tobytes()


def test_closed_without_drain() -> None:
    """Operations in flight are awaited; ranges that wait for room or a copy complete as failed."""
    image, pool = FileImage.of("image", [_memory(5 * _PIECE, staged=True)]), _Pool()
    calls: list[bool] = []
    with _engine(_Ring(bytearray(5 * _PIECE)), 4, pool, writes=False) as engine:
        for start in range(0, 5 * _PIECE, _PIECE):
            engine.read(_FILE, Extent(image, start, start + _PIECE, start), calls.append)
    assert calls == [False] * 5
    assert pool.out == 0
    assert not np.any(image.views(0, 5 * _PIECE)[0])


def test_a_copy_that_fails() -> None:
    """The range of a block that cannot be copied out fails, and its block comes back."""

    class Broken(FileImage):
        def scatter(self, start: int, stop: int, block: Bytes) -> int:
            if start == _PIECE:
                raise OSError(errno.EFAULT, "Bad address")
            return super().scatter(start, stop, block)

    image, pool = Broken.of("image", [_memory(3 * _PIECE, staged=True)]), _Pool()
    calls: dict[int, bool] = {}
    with _engine(_Ring(bytearray(3 * _PIECE)), 4, pool, writes=False) as engine:
        for start in range(0, 3 * _PIECE, _PIECE):

            def ended(whole: bool, at: int = start) -> None:
                calls[at] = whole

            engine.read(_FILE, Extent(image, start, start + _PIECE, start), ended)
        with pytest.raises(OSError, match="Bad address"):
            engine.drain()
    assert calls == {0: True, _PIECE: False, 2 * _PIECE: True}
    assert pool.out == 0
