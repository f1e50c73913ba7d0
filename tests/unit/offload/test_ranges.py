"""The ranges of ranks: every element once, in equal shares, at aligned places."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from iobench.offload.layout import ALIGN
from iobench.offload.ranges import ranges_of

_SIZES = st.lists(st.integers(0, 500), min_size=1, max_size=8)


@given(_SIZES, st.integers(1, 9))
def test_every_element_once(sizes: list[int], ranks: int) -> None:
    """In the order of the ranks they are the flat parameters; shares differ by one unit."""
    found = ranges_of(sizes, ranks)
    assert len(found) == ranks
    flat = [(one.parameter, at) for own in found for one in own for at in range(one.begin, one.end)]
    assert flat == [(index, at) for index, size in enumerate(sizes) for at in range(size)]
    assert all(one.begin % ALIGN == 0 for own in found for one in own)
    units = [sum(-(-(one.end - one.begin) // ALIGN) for one in own) for own in found]
    assert max(units) - min(units) <= 1
