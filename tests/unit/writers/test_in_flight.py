"""InFlight: operations are continued until they are complete; all in flight are awaited."""

from __future__ import annotations

import ctypes
import errno
import random
from collections import Counter
from collections.abc import Sequence
from typing import Self

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.linux import DioAlignment
from iobench.testing import content
from iobench.writers.direct import in_flight as module
from iobench.writers.direct.in_flight import InFlight
from iobench.writers.image import Bytes
from iobench.writers.local.direct_file import DirectFile
from iobench.writers.transfer import Meter, PathCount

_ALIGNMENT = 512
_BLOCK = 8 * _ALIGNMENT


class FakeRing:
    """A ring over a file in memory. Operations end in any order, short, or with an errno. Each
    completion takes one of `outcomes`: the most units of the alignment, or a negative errno. When
    none is left, every operation is complete."""

    def __init__(self, file: bytearray, outcomes: Sequence[int] = (), seed: int = 0) -> None:
        self.file, self.outcomes, self.order = file, list(outcomes), random.Random(seed)
        self.queued: dict[int, tuple[bool, int, int, int]] = {}
        self.closed = False
        self.refuses: BaseException | None = None
        self.most = 0

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._queue(True, address, length, offset, tag)

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._queue(False, address, length, offset, tag)

    def _queue(self, writes: bool, address: int, length: int, offset: int, tag: int) -> None:
        if self.refuses is not None:
            raise self.refuses
        assert length % _ALIGNMENT == offset % _ALIGNMENT == 0, "the kernel would say EINVAL"
        assert tag not in self.queued
        self.queued[tag] = (writes, address, length, offset)
        self.most = max(self.most, len(self.queued))

    def wait(self) -> tuple[int, int]:
        assert self.queued, "waits for ever"
        tag = self.order.choice(list(self.queued))
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

    def peek(self) -> tuple[int, int] | None:
        return self.wait() if self.queued and self.order.random() < 0.5 else None

    def close(self) -> None:
        assert not self.queued, "closed with operations in flight"
        self.closed = True


class _InFlight(InFlight):
    """Closed at the end of a `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def drain(self) -> None:
        while len(self):
            self.wait_one()


def _in_flight(ring: FakeRing, *, writes: bool, meter: Meter | None = None) -> _InFlight:
    return _InFlight(ring, writes=writes, path="fake", meter=meter or Meter())


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


@given(
    outcomes=_OUTCOMES,
    seed=st.integers(0, 9999),
    depth=st.integers(1, 6),
    blocks=st.integers(1, 12),
)
def test_every_byte_is_written(outcomes: list[int], seed: int, depth: int, blocks: int) -> None:
    """Short counts and transient errors, completed in any order, lose and mix no bytes."""
    data = content(blocks * _BLOCK, seed)
    ring, meter, ended = FakeRing(bytearray(), outcomes, seed), Meter(), Counter[int]()
    ring.file.extend(bytes(len(data)))
    with _in_flight(ring, writes=True, meter=meter) as in_flight:
        for start in range(0, len(data), _BLOCK):
            while len(in_flight) >= depth:
                in_flight.wait_one()
            block = data[start : start + _BLOCK]
            in_flight.start(
                _FILE, block, start, _BLOCK, lambda whole, at=start: ended.update({at: whole})
            )
        in_flight.drain()
    assert bytes(ring.file) == data.tobytes()
    assert ended == Counter(dict.fromkeys(range(0, len(data), _BLOCK), 1))
    assert ring.most <= depth
    assert ring.closed
    assert meter.paths["fake"].bytes == len(data)
    turned_down = sum(o < 0 for o in outcomes) - sum(o < 0 for o in ring.outcomes)
    assert meter.retries == turned_down


@given(outcomes=_OUTCOMES, seed=st.integers(0, 9999), tail=st.integers(1, _BLOCK))
def test_every_byte_is_read(outcomes: list[int], seed: int, tail: int) -> None:
    """The same for reads, where the last block has room for more than the file holds."""
    data = content(4 * _BLOCK + tail, seed)
    ring = FakeRing(bytearray(data.tobytes()), outcomes, seed)
    room = np.zeros(5 * _BLOCK, dtype=np.uint8)
    with _in_flight(ring, writes=False) as in_flight:
        for start in range(0, len(data), _BLOCK):
            wanted = min(_BLOCK, len(data) - start)
            padded = -(-wanted // _ALIGNMENT) * _ALIGNMENT
            in_flight.start(_FILE, room[start : start + padded], start, wanted, lambda _: None)
        in_flight.drain()
    assert np.array_equal(room[: len(data)], data)


def test_refused_too_often() -> None:
    """An operation that always gets a transient error fails in the end, with that errno."""
    ring = FakeRing(bytearray(_BLOCK), [-errno.EAGAIN] * 1000)
    with pytest.raises(OSError, match="Resource temporarily") as caught:
        _move_one(ring)
    assert caught.value.errno == errno.EAGAIN


def _move_one(ring: FakeRing, *, writes: bool = True, data: Bytes | None = None) -> None:
    with _in_flight(ring, writes=writes) as in_flight:
        data = content(_BLOCK) if data is None else data
        in_flight.start(_FILE, data, 0, len(data), lambda _: None)
        in_flight.wait_one()


def test_a_callback_that_fails() -> None:
    """An exception of `on_complete` is raised; all other operations are still awaited."""
    ring = FakeRing(bytearray(4 * _BLOCK))

    def fails(whole: bool) -> None:
        if whole:
            raise ValueError("scatter")

    def save() -> None:
        with _in_flight(ring, writes=True) as in_flight:
            for start in range(0, 4 * _BLOCK, _BLOCK):
                in_flight.start(_FILE, content(_BLOCK), start, _BLOCK, fails)
            in_flight.drain()

    with pytest.raises(ValueError, match="scatter"):
        save()
    assert ring.closed


@pytest.mark.parametrize("fails", [False, True])
def test_a_ring_that_fails_when_it_is_closed(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The failure is raised, or becomes a note of an earlier one; nothing is in flight after it."""
    lost: list[Bytes] = []
    monkeypatch.setattr(module, "_lost", lost)
    ring, ended = FakeRing(bytearray(2 * _BLOCK)), []
    data, in_flight = content(2 * _BLOCK), _in_flight(ring, writes=True)

    def broken() -> tuple[int, int]:
        raise OSError(errno.EBADF, "Bad file descriptor")

    def save() -> None:
        with in_flight:
            for start in (0, _BLOCK):
                in_flight.start(_FILE, data[start : start + _BLOCK], start, _BLOCK, ended.append)
            monkeypatch.setattr(ring, "wait", broken)
            if fails:
                raise ValueError("the caller's")

    monkeypatch.setattr(ring, "close", lambda: setattr(ring, "closed", True))
    with pytest.raises(ValueError if fails else OSError) as caught:
        save()
    assert any("Bad file" in note for note in getattr(caught.value, "__notes__", [])) == fails
    assert (ring.closed, len(in_flight), ended, len(lost)) == (True, 0, [], 2)


def test_a_callback_that_fails_while_the_ring_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was not awaited is kept, and not reused while the kernel may use it."""
    lost: list[Bytes] = []
    monkeypatch.setattr(module, "_lost", lost)
    ring, data = FakeRing(bytearray(3 * _BLOCK)), content(_BLOCK)
    monkeypatch.setattr(ring, "close", lambda: setattr(ring, "closed", True))

    def fails(_: bool) -> None:
        raise ValueError("a callback's")

    def save() -> None:
        with _in_flight(ring, writes=True) as in_flight:
            for start in range(0, 3 * _BLOCK, _BLOCK):
                in_flight.start(_FILE, data, start, _BLOCK, fails)

    with pytest.raises(ValueError, match="a callback's"):
        save()
    assert ring.closed
    assert len(lost) == len(ring.queued) == 2


def test_what_is_counted() -> None:
    """Operations are system calls, bytes are those of the blocks."""
    ring, meter = FakeRing(bytearray(_BLOCK), [3, 3]), Meter()
    with _in_flight(ring, writes=True, meter=meter) as in_flight:
        in_flight.start(_FILE, content(_BLOCK), 0, _BLOCK, lambda _: None)
        in_flight.drain()
    assert meter.paths == {"fake": PathCount(operations=3, bytes=_BLOCK)}
    assert set(meter.seconds) == {"submit", "write"}
    assert list(meter.latencies["write"].bins.values()) == [1], "one block in three calls"
