"""The change of a rate: it is found where there is one, and noise alone does not look like one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from iobench.stats.over_time import find_change

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


def test_a_step_is_found_where_it_is() -> None:
    """Four times as fast for 4 of 12 saves, without noise: the interval is one position."""
    change = find_change([40.0] * 4 + [10.0] * 8)
    assert change is not None
    assert (change.position, change.low, change.high) == (4, 4, 4)


def test_a_rise_is_a_change_too() -> None:
    change = find_change([10.0, 10.1, 9.9, 10.0, 10.1, 15.0, 15.1, 14.9, 15.0, 15.2])
    assert change is not None
    assert change.position == 5


@pytest.mark.parametrize(
    "rates", [[], [1.0] * 5, [1.0] * 40, [9.0, 1.0, 9.0, 1.0, 9.0], [1.0, 50.0, *[1.0] * 10]]
)
def test_what_is_no_change(rates: list[float]) -> None:
    """Too few saves, equal ones, ones that go up and down, and a single outlier."""
    assert find_change(rates) is None


def test_a_change_below_a_tenth_is_not_claimed() -> None:
    """However clear it is."""
    assert find_change([1.09, 1.08, 1.09] * 10 + [1.0, 1.01, 1.0] * 10) is None
    assert find_change([1.12, 1.11, 1.12] * 10 + [1.0, 1.01, 1.0] * 10) is not None


def test_a_rate_must_be_above_zero() -> None:
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="above zero"):
            find_change([1.0] * 10 + [wrong])


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [
        lambda random, n: random.normal(0, 0.2, n),
        lambda random, n: 0.05 * random.standard_t(2, n),
        lambda random, n: random.normal(0, 0.01, n) - math.log(2) * (random.random(n) < 0.3),
    ],
    ids=["normal", "heavy tails", "two-valued"],
)
def test_equal_noise_makes_up_no_change(draw: Draw) -> None:
    """At most 5% of the series have one; benchmarks/error_rates.py draws more of them."""
    random, runs = np.random.default_rng(1), 100
    for saves in (12, 60):
        series = (np.exp(draw(random, saves)).tolist() for _ in range(runs))
        assert sum(find_change(one) is not None for one in series) <= 0.05 * runs


@pytest.mark.slow
def test_neighbours_that_are_alike_rarely_make_up_a_change() -> None:
    """Another user of the storage disturbs several saves. Their order is permuted by simpler tests,
    which find a change in more than half of these series."""
    random, runs, saves, found = np.random.default_rng(1), 50, 120, 0
    for _ in range(runs):
        logs = random.normal(0, 0.1, saves)
        for at in range(1, saves):
            logs[at] = 0.7 * logs[at - 1] + math.sqrt(1 - 0.7**2) * logs[at]
        found += find_change(np.exp(logs).tolist()) is not None
    assert found <= 0.1 * runs


@pytest.mark.slow
def test_the_interval_holds_the_change() -> None:
    """In 95% of the series, as the noise is as large as a fifth of the change."""
    random, runs, held = np.random.default_rng(1), 100, 0
    for _ in range(runs):
        logs = random.normal(0, 0.15, 40)
        logs[:8] += math.log(1.6)
        change = find_change(np.exp(logs).tolist())
        assert change is not None
        held += change.low <= 8 <= change.high
    assert held >= 0.9 * runs
