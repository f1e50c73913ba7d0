"""Copies of host memory: the same bytes by both loops, and the choice between them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.units import MIB
from iobench.writers.blocks.copies import (
    LARGE,
    CopyLoops,
    copy_bytes,
    gather_views,
    scatter_views,
)

_RANDOM = np.random.default_rng(16)
_DATA = _RANDOM.integers(0, 256, size=4 * MIB, dtype=np.uint8)


def _clock(durations: list[float]) -> Iterator[float]:
    """Yield the times at the begin and the end of copies that take this long."""
    now_s = 0.0
    for duration_s in durations:
        yield now_s
        now_s += duration_s
        yield now_s


@pytest.mark.parametrize(("odd", "even"), [(1.0, 2.0), (2.0, 1.0)])
def test_the_faster_loop_is_chosen(odd: float, even: float) -> None:
    # The first copy by each loop makes pages: it must not decide.
    times = _clock([100.0, 100.0, *[odd, even] * 5])
    loops = CopyLoops(clock=lambda: next(times))
    target = np.empty_like(_DATA)
    for _ in range(12):
        assert loops.chosen is None
        target[:] = 0
        loops.copy(_DATA, target)
        assert np.array_equal(target, _DATA)
    loops.copy(_DATA, target)  # and reads no clock
    other = _clock([100.0, 100.0, *[even, odd] * 5])
    opposite = CopyLoops(clock=lambda: next(other))
    for _ in range(12):
        opposite.copy(_DATA, target)
    assert None not in {loops.chosen, opposite.chosen}
    assert loops.chosen is not opposite.chosen


def test_small_copies_are_not_timed() -> None:
    loops = CopyLoops(clock=lambda: pytest.fail("timed"))
    source, target = _DATA[:-1], np.zeros(len(_DATA) - 1, dtype=np.uint8)
    loops.copy(source, target)
    assert np.array_equal(target, source)


@given(
    sizes=st.lists(st.sampled_from([0, 1, 63, 4096, LARGE - 1, LARGE, LARGE + 5]), max_size=8),
    shift=st.integers(0, 70),
    begin=st.integers(0, 70),
)
def test_gathered_views_are_their_bytes_in_order(sizes: list[int], shift: int, begin: int) -> None:
    """And views that are filled from these bytes are the same again; nothing else changes."""
    views, at = [], shift
    for size in sizes:
        views.append(_DATA[at : at + size])
        at += size + 7
    total = sum(sizes)
    room = np.full(begin + total + 9, 170, dtype=np.uint8)
    gather_views(views, room[begin:])
    assert room[begin : begin + total].tobytes() == b"".join(view.tobytes() for view in views)
    assert set(room[:begin]) | set(room[begin + total :]) <= {170}
    memory = np.full(at + 9, 170, dtype=np.uint8)
    ends = [len(view) + (view.ctypes.data - _DATA.ctypes.data) for view in views]
    filled = [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    assert scatter_views(room[begin:], filled) == total
    assert all(map(np.array_equal, filled, views))
    assert (memory == 170).sum() >= len(memory) - total


def test_bits_of_a_read_only_source_stay_as_they_are() -> None:
    source = np.arange(256, dtype=np.uint8).repeat(16 * 1024)
    source.flags.writeable = False
    target = np.zeros_like(source)
    for _ in range(14):  # by both loops
        target[:] = 255
        copy_bytes(source, target)
        assert np.array_equal(target, source)
