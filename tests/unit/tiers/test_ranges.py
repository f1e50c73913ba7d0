"""SharedRanges: each byte of a file is filled by one of two tiers, in any order of events."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from iobench.tiers.ranges import SharedRanges, next_size


def _size(own: float | None, other: float | None, left: int = 1000) -> int:
    return next_size(left, own, other, least=10, most=300)


def test_how_much_next() -> None:
    """Half of the share that ends at the same time as the other tier, within the limits."""
    assert _size(None, 5.0) == 10  # to be measured
    assert _size(5.0, None) == 300  # the other one has delivered nothing yet
    assert _size(1.0, 1.0) == 250
    assert _size(9.0, 1.0) == 300
    assert _size(1.0, 99.0) == 10
    assert _size(1.0, 100.0) == 0  # its share is below the least
    assert _size(1.0, 1.0, left=18) == 0


@given(st.integers(0, 50), st.lists(st.tuples(st.sampled_from("fbdxg"), st.integers(1, 20))))
def test_every_byte_once(size: int, events: list[tuple[str, int]]) -> None:
    """Whatever the tiers do: at the end each byte was filled by the tier that had it last."""
    ranges, filled = SharedRanges(0, size), [0] * size
    lent: tuple[int, int] | None = None

    def fill(part: tuple[int, int]) -> None:
        for byte in range(*part):
            filled[byte] += 1

    for event, most in events:
        if event == "f" and (part := ranges.take_front(most)) is not None:
            fill(part)
        elif event == "b" and lent is None:
            lent = ranges.take_back(most)
        elif event == "d" and lent is not None:
            ranges.deliver(lent, partial(fill, lent))
            lent = None
        elif event == "x":  # the second tier fails
            ranges.withdraw()
            lent = None
        elif event == "g" and (part := ranges.take_front(most)) is not None:
            ranges.give_back(part)  # the first tier fails
    while (part := ranges.take_front(7)) is not None:
        fill(part)
    assert filled == [1] * size
    assert ranges.left == 0
    if lent is not None:
        assert not ranges.deliver(lent, lambda: fill((0, 1)))


def test_the_first_tier_takes_what_the_second_has_not_delivered() -> None:
    """It waits for nothing; a delivery that comes later changes nothing."""
    ranges = SharedRanges(0, 10)
    lent = ranges.take_back(4)
    assert lent == (6, 10)
    assert ranges.take_front(100) == (0, 6)
    assert ranges.take_front(100) == (6, 10)
    assert ranges.take_front(100) is None
    assert not ranges.deliver(lent, lambda: 1 / 0)
    ranges.close()
    assert ranges.take_back(1) is None
