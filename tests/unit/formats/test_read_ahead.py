"""joined: ranges near each other are read together, whatever their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from iobench.formats.read_ahead import FileRange, joined
from iobench.formats.tensor_slices import GAP_BYTES
from iobench.linux import PAGE

_FILES = {"a": 5_000_001, "b": 3 * PAGE}


@given(
    picks=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 5_000_001), st.integers(0, 2_000_000))
    ),
    at_once=st.sampled_from([1, PAGE, 1 << 20, 1 << 22]),
)
def test_every_range_is_in_one_window(picks: list[tuple[str, int, int]], at_once: int) -> None:
    """In its order, in whole pages of its file; only ranges near each other share a window."""
    ranges = []
    for number, (path, start, length) in enumerate(picks):
        begin = min(start, _FILES[path])
        ranges.append(FileRange(path, begin, min(begin + length, _FILES[path]), number))
    windows = list(joined(ranges, _FILES, at_once))
    assert [one for window in windows for one in window.wanted] == ranges
    for window in windows:
        stop = window.wanted[0].stop
        assert window.start % PAGE == 0
        assert window.stop % PAGE == 0 or window.stop == _FILES[window.path]
        for one in window.wanted:
            assert one.path == window.path
            assert window.start <= one.start <= one.stop <= window.stop
            assert one.start < stop + GAP_BYTES
            stop = max(stop, one.stop)
        if len(window.wanted) > 1:
            assert stop - window.wanted[0].start <= at_once
