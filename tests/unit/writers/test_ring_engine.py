"""RingEngine: operations are continued until they are complete; all in flight are awaited.

Blocks are filled while the queue is full, every byte is in its place, no block is lost.
"""

from __future__ import annotations

import ctypes
import errno
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.counted_pool import CountedPool

from iobench.linux import DioAlignment
from iobench.testing import content
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.direct import engine as module
from iobench.writers.direct.engine import DirectOperation, RingEngine
from iobench.writers.image import Bytes, Extent, FileImage
from iobench.writers.local.direct_file import DirectFile
from iobench.writers.transfer import Meter, PathCount

_ALIGNMENT = 512
_BLOCK = 8 * _ALIGNMENT


class FakeRing:
    """A ring over a file in memory.

    Each completion takes one of `outcomes`: the most units of the alignment, or a negative errno.
    When none is left, every operation is complete. With `seed` they end in any order.
    """

    def __init__(
        self,
        file: bytearray,
        outcomes: Sequence[int] = (),
        seed: int | None = None,
        *,
        memory: int = 1,
    ) -> None:
        """Addresses must be multiples of `memory`."""
        self.file, self.outcomes, self._memory = file, list(outcomes), memory
        self._order = None if seed is None else random.Random(seed)
        self.queued: dict[int, tuple[bool, int, int, int]] = {}
        self.closed = False
        self.refuses: BaseException | None = None
        self.begun = self.most = 0

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._queue(True, address, length, offset, tag)

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._queue(False, address, length, offset, tag)

    def _queue(self, writes: bool, address: int, length: int, offset: int, tag: int) -> None:
        if self.refuses is not None:
            raise self.refuses
        aligned = length % _ALIGNMENT == offset % _ALIGNMENT == address % self._memory == 0
        assert aligned, "the kernel would say EINVAL"
        assert tag not in self.queued
        self.queued[tag] = (writes, address, length, offset)
        self.begun += 1
        self.most = max(self.most, len(self.queued))

    def wait(self) -> tuple[int, int]:
        assert self.queued, "waits for ever"
        tags = list(self.queued)
        tag = self._order.choice(tags) if self._order else tags[0]
        writes, address, length, offset = self.queued.pop(tag)
        outcome = self.outcomes.pop(0) if self.outcomes else length
        if outcome < 0:
            return tag, outcome
        count = min(length, outcome * _ALIGNMENT if outcome < length else outcome)
        memory = (ctypes.c_char * length).from_address(address)
        if writes:
            self.file[offset : offset + count] = memory[:count]
            return tag, count
        found = bytes(self.file[offset : offset + count])
        memory[: len(found)] = found
        return tag, len(found)

    def close(self) -> None:
        assert not self.queued, "closed with operations in flight"
        self.closed = True


def _engine(
    ring: FakeRing, iodepth: int = 9, pool: BlockPool | None = None, meter: Meter | None = None
) -> RingEngine:
    return RingEngine(ring, iodepth, pool or BlockPool(_PIECE), meter or Meter(), path="fake")


_FILE = DirectFile(fd=3, alignment=DioAlignment(memory=_ALIGNMENT, offset=_ALIGNMENT))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _: None)


_OUTCOMES = st.lists(
    st.one_of(
        st.integers(1, _BLOCK // _ALIGNMENT),
        st.sampled_from([-errno.EAGAIN, -errno.EINTR, -errno.ECANCELED]),
    ),
    max_size=60,
)


def test_refused_too_often() -> None:
    """An operation that always gets a transient error fails in the end, with that errno."""
    ring = FakeRing(bytearray(_BLOCK), [-errno.EAGAIN] * 1000)
    with pytest.raises(OSError, match="Resource temporarily") as caught:
        _move_one(ring)
    assert caught.value.errno == errno.EAGAIN


def _move_one(ring: FakeRing, *, writes: bool = True, data: Bytes | None = None) -> None:
    with _engine(ring) as engine:
        data = content(_BLOCK) if data is None else data
        engine.start(DirectOperation(_FILE, data, 0, len(data), lambda _: None, writes))
        engine.wait_one()


@pytest.mark.parametrize("fails", [False, True])
def test_a_ring_that_fails_when_it_is_closed(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The failure is raised, or becomes a note of an earlier one; nothing is in flight after it."""
    lost: list[Bytes] = []
    monkeypatch.setattr(module, "_lost", lost)
    ring, ended = FakeRing(bytearray(2 * _BLOCK)), []
    data, engine = content(2 * _BLOCK), _engine(ring)

    def broken() -> tuple[int, int]:
        raise OSError(errno.EBADF, "Bad file descriptor")

    def save() -> None:
        with engine:
            for start in (0, _BLOCK):
                part = data[start : start + _BLOCK]
                engine.start(DirectOperation(_FILE, part, start, _BLOCK, ended.append, True))
            monkeypatch.setattr(ring, "wait", broken)
            if fails:
                raise ValueError("the caller's")

    monkeypatch.setattr(ring, "close", lambda: setattr(ring, "closed", True))
    with pytest.raises(ValueError if fails else OSError) as caught:
        save()
    assert any("Bad file" in note for note in getattr(caught.value, "__notes__", [])) == fails
    assert (ring.closed, len(engine), ended, len(lost)) == (True, 0, [], 2)


def test_what_is_counted() -> None:
    """Operations are system calls, bytes are those of the blocks."""
    ring, meter = FakeRing(bytearray(_BLOCK), [3, 3]), Meter()
    with _engine(ring, meter=meter) as engine:
        engine.start(DirectOperation(_FILE, content(_BLOCK), 0, _BLOCK, lambda _: None, True))
        engine.drain()
    assert meter.paths == {"fake": PathCount(operations=3, bytes=_BLOCK)}
    assert set(meter.seconds) == {"submit", "write"}
    assert list(meter.latencies["write"].bins.values()) == [1], "one block in three calls"


_PIECE = 4096


def _memory(size: int, *, staged: bool) -> Bytes:
    """Memory that must be copied, or that is aligned."""
    room = fresh_pages(size + _ALIGNMENT, huge=False)
    return room[1 : size + 1] if staged else room[:size]


def _ring(file: bytearray) -> FakeRing:
    return FakeRing(file, memory=_ALIGNMENT)


@given(
    outcomes=_OUTCOMES,
    seed=st.integers(0, 9999),
    ordered=st.booleans(),
    iodepth=st.integers(1, 9),
    ranges=st.integers(1, 8),
    tail=st.integers(1, 3 * _PIECE),
    staged=st.booleans(),
    writes=st.booleans(),
)
def test_every_byte_is_moved(
    outcomes: list[int],
    seed: int,
    ordered: bool,
    iodepth: int,
    ranges: int,
    tail: int,
    staged: bool,
    writes: bool,
) -> None:
    """Short counts and transient errors, in any order of completion, lose and mix no bytes.

    Operations in flight and blocks in use stay bounded.
    """
    size = 3 * _PIECE
    total = (ranges - 1) * size + tail
    data, memory = content(total, seed), _memory(total, staged=staged)
    image, calls = FileImage.of("image", [memory]), Counter[int]()
    if writes:
        memory[:] = data
    file = bytearray(total) if writes else bytearray(data.tobytes())
    ring = FakeRing(file, outcomes, None if ordered else seed, memory=_ALIGNMENT)
    pool = CountedPool(_PIECE)
    with _engine(ring, iodepth, pool) as engine:
        for start in range(0, total, size):
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
    assert pool.most <= iodepth + 1
    assert not pool.out
    turned_down = sum(one < 0 for one in outcomes) - sum(one < 0 for one in ring.outcomes)
    assert engine.meter.retries == turned_down


def test_blocks_are_filled_before_the_queue_has_room() -> None:
    """When a write completes, the next block has been filled already."""
    copied: list[int] = []

    class Watched(FileImage):
        def gather(self, start: int, stop: int, block: Bytes) -> int:
            copied.append(start // _PIECE)
            return super().gather(start, stop, block)

    memory = _memory(16 * _PIECE, staged=True)
    memory[:] = content(len(memory))
    image, ring = Watched.of("image", [memory]), _ring(bytearray())
    with _engine(ring, 4, BlockPool(_PIECE)) as engine:
        wait, before = ring.wait, list[tuple[int, list[int]]]()
        ring.wait = lambda: (before.append((ring.begun, [*copied])), wait())[1]
        engine.write(_FILE, Extent(image, 0, 5 * _PIECE, 0))
        assert before == [(4, [0, 1, 2, 3, 4])]
        engine.drain()
    assert bytes(ring.file) == memory[: 5 * _PIECE].tobytes()


def test_the_next_read_starts_before_a_copy() -> None:
    """When a read completes, the next one starts before the block is copied out."""
    in_flight: list[int] = []

    class Watched(FileImage):
        def scatter(self, start: int, stop: int, block: Bytes) -> int:
            in_flight.append(len(ring.queued))
            return super().scatter(start, stop, block)

    data = content(16 * _PIECE)
    image = Watched.of("image", [_memory(16 * _PIECE, staged=True)])
    ring = _ring(bytearray(data.tobytes()))
    with _engine(ring, 8, BlockPool(_PIECE)) as engine:
        engine.read(_FILE, Extent(image, 0, 16 * _PIECE, 0))
        assert in_flight == [8] * 8
        engine.drain()
    assert in_flight[8:] == [7, 6, 5, 4, 3, 2, 1, 0]


def test_closed_without_drain() -> None:
    """Operations in flight are awaited; their ranges complete as failed."""
    image, pool = FileImage.of("image", [_memory(4 * _PIECE, staged=True)]), CountedPool(_PIECE)
    calls: list[bool] = []
    with _engine(_ring(bytearray(4 * _PIECE)), 4, pool) as engine:
        for start in range(0, 4 * _PIECE, _PIECE):
            engine.read(_FILE, Extent(image, start, start + _PIECE, start), calls.append)
    assert calls == [False] * 4
    assert not pool.out
    assert not np.any(image.views(0, 4 * _PIECE)[0])


def test_a_copy_that_fails() -> None:
    """The range of a block that cannot be copied out fails, and its block comes back."""

    class Broken(FileImage):
        def scatter(self, start: int, stop: int, block: Bytes) -> int:
            if start == _PIECE:
                raise OSError(errno.EFAULT, "Bad address")
            return super().scatter(start, stop, block)

    image, pool = Broken.of("image", [_memory(3 * _PIECE, staged=True)]), CountedPool(_PIECE)
    calls: dict[int, bool] = {}
    with _engine(_ring(bytearray(3 * _PIECE)), 4, pool) as engine:
        for start in range(0, 3 * _PIECE, _PIECE):

            def ended(whole: bool, at: int = start) -> None:
                calls[at] = whole

            engine.read(_FILE, Extent(image, start, start + _PIECE, start), ended)
        with pytest.raises(OSError, match="Bad address"):
            engine.drain()
    assert calls == {0: True, _PIECE: False, 2 * _PIECE: True}
    assert not pool.out
