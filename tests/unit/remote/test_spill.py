"""Which snapshot is written next, and which parts of a device are free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.remote.backing import FreeRanges
from iobench.remote.snapshot_memory import next_to_write

_FAST, _SLOW, _BOTH = {"fast": 10}, {"slow": 10}, {"fast": 4, "slow": 6}


@pytest.mark.parametrize(
    ("waiting", "fast_free", "slow_free", "expected"),
    [
        pytest.param([_FAST, _FAST, _SLOW, _SLOW], 0.0, 0.5, 1, id="the fast memory is scarce"),
        pytest.param([_FAST, _SLOW, _SLOW, _FAST], 0.5, 0.1, 2, id="the slow memory is scarce"),
        pytest.param([_SLOW, _FAST, _SLOW], 0.0, 0.0, 1, id="both are full: the fast one"),
        pytest.param([_SLOW, _SLOW, _BOTH], 0.2, 0.1, 1, id="the newest that is whole in it"),
        pytest.param([_FAST, _BOTH], 0.2, 0.1, 1, id="only a part in it"),
        pytest.param([_SLOW, _SLOW], 0.0, 0.5, 1, id="none in the scarce one"),
        pytest.param([_FAST], 1.0, 1.0, 0, id="one"),
    ],
)
def test_the_scarcest_memory_first_and_the_newest_in_it(
    waiting: list[dict[str, int]], fast_free: float, slow_free: float, expected: int
) -> None:
    assert next_to_write(waiting, {"fast": fast_free, "slow": slow_free}) == expected


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10)), max_size=60))
def test_ranges_never_overlap_and_are_all_given_back(requests: list[tuple[int, int]]) -> None:
    """Every range is inside; when all are given back, the device is one free range again."""
    free, taken = FreeRanges(100), list[tuple[int, int]]()
    for size, give in requests:
        largest = free.largest
        start = free.take(size)
        assert (start is None) == (size > largest)
        if start is not None:
            assert 0 <= start <= 100 - size
            assert all(start + size <= other or start >= other + n for other, n in taken)
            taken.append((start, size))
        if taken and give > 5:
            free.give(*taken.pop(give % len(taken)))
    for one in taken:
        free.give(*one)
    assert free.largest == 100
