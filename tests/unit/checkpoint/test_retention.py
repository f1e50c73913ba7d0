"""The checkpoints that a policy keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench import KeepAll, KeepEvery, KeepLast
from iobench.errors import OptionError

_HOURLY = {step: step * 3600.0 for step in range(20)}


def test_what_is_kept() -> None:
    """The newest ones, by step; or the oldest and then one per period, where the newest is never
    removed. `|` keeps the checkpoints of both policies."""
    assert KeepLast(3).obsolete(_HOURLY) == list(range(17))
    assert KeepLast(30).obsolete(_HOURLY) == []
    assert KeepLast(1).obsolete({}) == []
    assert KeepEvery(hours=6).kept(_HOURLY) == {0, 6, 12, 18}
    assert 19 not in KeepEvery(hours=6).obsolete(_HOURLY)
    assert KeepEvery(steps=8).kept(_HOURLY) == {0, 8, 16}
    assert (KeepLast(2) | KeepEvery(steps=10)).kept(_HOURLY) == {0, 10, 18, 19}
    assert (KeepLast(1) | KeepAll()).obsolete(_HOURLY) == []


def test_training_that_went_back() -> None:
    """The newest is the last saved one, whatever its step; abandoned steps are the oldest."""
    gone_back = {100: 1.0, 200: 2.0, 300: 3.0, 210: 4.0}
    assert KeepLast(2).obsolete(gone_back) == [300, 100]
    assert KeepLast(4).obsolete(gone_back) == []
    assert KeepEvery(hours=2 / 3600).kept(gone_back) == {100, 300}
    assert KeepEvery(steps=100).kept(gone_back) == {100, 200, 300, 210}
    assert KeepEvery(steps=1000).obsolete(gone_back) == [300, 200]
    before = {0: 0.0, 120: 1.0, 230: 2.0}
    assert KeepEvery(steps=100).kept({**before, 100: 3.0}) == {0, 120, 230, 100}


def test_a_clock_that_goes_back() -> None:
    """Kept steps stay kept, and counting continues from the new time."""
    hours = [0, 0.5, 1, 2, -3, -2.5, -2, 2.1]
    created_s = {step: at * 3600.0 for step, at in enumerate(hours)}
    assert KeepEvery(hours=1).kept(created_s) == {0, 2, 3, 4, 6, 7}


@given(st.lists(st.integers(-60, 50), max_size=30), st.integers(1, 5), st.integers(1, 90))
def test_removing_at_once_or_bit_by_bit(gaps: list[int], count: int, period: int) -> None:
    """The result depends neither on when retention ran, nor on a clock that goes back."""
    every = KeepEvery(hours=period / 3600)
    policy = KeepLast(count) | every
    everything: dict[int, float] = {}
    held: dict[int, float] = {}
    kept: set[int] = set()
    at = 0.0
    for step, gap in enumerate(gaps):
        at += gap
        everything[step] = held[step] = at
        for gone in policy.obsolete(held):
            del held[gone]
        kept |= every.kept(held)
        assert kept <= held.keys()
    assert set(held) == policy.kept(everything)


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(0),
        lambda: KeepLast("3"),
        lambda: KeepLast(2.5),
        lambda: KeepEvery(),
        lambda: KeepEvery(hours=-1),
        lambda: KeepEvery(hours="6"),
    ],
)
def test_nonsense(make) -> None:
    """A policy that would keep nothing, or that is not a policy, is refused."""
    with pytest.raises(OptionError):
        make()
    with pytest.raises(TypeError, match="unsupported operand"):
        KeepLast(3) | 5
