"""MeasuredIodepth: on a paper device whose rate depends on the depth."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.units import GIB, MIB
from iobench.writers.iodepth import Iodepth, MeasuredIodepth

_PIECE = 2 * MIB


class _Device:
    """Moves pieces, at bytes per second that depend on the depth and on what was moved."""

    def __init__(self, rate: Callable[[int, int], float], most: int = 16) -> None:
        self.rate, self.seconds, self.moved = rate, 0.0, 0
        self.depth = MeasuredIodepth(most, clock=lambda: self.seconds)
        self.at: dict[int, int] = {}
        """Bytes moved at each depth."""

    def move(self, size: int) -> None:
        for _ in range(0, size, _PIECE):
            now = self.depth.now
            self.seconds += _PIECE / self.rate(now, self.moved)
            self.moved += _PIECE
            self.at[now] = self.at.get(now, 0) + _PIECE
            self.depth.landed(_PIECE)


def test_a_fixed_one_stays() -> None:
    """As many as asked, whatever is told."""
    depth = Iodepth(8)
    for _ in range(1000):
        depth.landed(64 * MIB)
        depth.disturbed()
    assert (depth.now, depth.most) == (8, 8)


@pytest.mark.parametrize(("few", "many", "wins"), [(3.1e9, 2.6e9, 4), (1.7e9, 2.4e9, 16)])
def test_the_faster_one_is_taken(few: float, many: float, wins: int) -> None:
    """Most bytes of a long transfer go at the depth that is faster here, the first few GiB too."""
    device = _Device(lambda depth, _: few if depth == 4 else many)
    device.move(3 * GIB)
    assert device.at[wins] > 0.85 * device.moved
    device.move(60 * GIB)
    assert device.at[wins] > 0.97 * device.moved


def test_a_trial_that_loses_is_cheap() -> None:
    """Of 3 GiB less than 1.5 % of the time is lost to finding out."""
    device = _Device(lambda depth, _: 1.7e9 if depth == 4 else 2.4e9)
    device.move(3 * GIB)
    assert device.seconds < 1.015 * 3 * GIB / 2.4e9


def test_it_moves_over_and_back() -> None:
    """The device changes in the middle: the depth follows."""
    device = _Device(lambda depth, moved: 3e9 if (depth == 4) == (moved < 20 * GIB) else 2e9)
    device.move(20 * GIB)
    assert device.depth.now == 4
    device.move(20 * GIB)
    assert device.depth.now == 16


def test_equal_ones_change_nothing() -> None:
    """Noise of a few per cent is no reason to move, and trials grow rare."""
    rng = random.Random(0)
    device = _Device(lambda *_: 2.4e9 * rng.uniform(0.9, 1.1))
    device.move(100 * GIB)
    assert device.depth.now == 16
    assert device.at[4] < 0.01 * device.moved


def test_what_is_disturbed_is_measured_again() -> None:
    """A pause in the middle of a stretch does not count as its time."""
    device = _Device(lambda depth, _: 3.1e9 if depth == 4 else 2.6e9)
    for _ in range(40):
        device.move(100 * MIB)
        device.seconds += 1.0
        device.depth.disturbed()
    assert device.depth.now == 16  # no stretch was ever whole
    device.move(GIB)
    assert device.depth.now == 4


@given(most=st.integers(1, 64), sizes=st.lists(st.integers(1, 1 << 30), max_size=80))
def test_never_outside(most: int, sizes: list[int]) -> None:
    """At least one and at most as many as asked, even where no time passes."""
    depth = MeasuredIodepth(most, clock=lambda: 1.0)
    for size in sizes:
        depth.landed(size)
        assert 1 <= depth.now <= most
