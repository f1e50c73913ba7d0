"""The statistics compared with values computed by hand and by scipy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from iobench.stats.estimates import (
    Interval,
    huber_mean,
    interval_heading,
    median,
    median_interval,
    outliers,
    paired_log_ratio,
    rate,
    steady_state,
)

positive = st.floats(1e-3, 1e12)


def test_a_rate_is_total_over_total() -> None:
    assert rate(100 + 100, 1 + 4) == 40  # the mean of the rates 100 and 25 would be 62.5


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_rate_needs_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="time above zero"):
        rate(1, seconds)


@pytest.mark.parametrize("values", [[], [1, math.nan], [math.inf]])
def test_what_has_no_median_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="value"):
        median(values)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (5, 1), (6, 1), (8, 1), (9, 2), (11, 2), (12, 3)])
def test_the_interval_by_the_tables_of_the_binomial(n: int, k: int) -> None:
    assert median_interval(range(1, n + 1)) == Interval(k, n + 1 - k)
    if n >= 6:  # fewer cannot have 95%
        assert 2 * scipy_stats.binom.cdf(k - 1, n, 0.5) <= 0.05
        assert 2 * scipy_stats.binom.cdf(k, n, 0.5) > 0.05


@pytest.mark.parametrize("n", [1023, 1024, 10_000])
def test_the_interval_of_very_many_values(n: int) -> None:
    interval = median_interval(range(n))
    assert interval is not None
    k = round(interval.low) + 1
    assert round(interval.high) == n - k
    assert 2 * scipy_stats.binom.cdf(k - 1, n, 0.5) <= 0.05 < 2 * scipy_stats.binom.cdf(k, n, 0.5)
    assert paired_log_ratio([1.0] * n, [2.0] * n).interval == Interval(0.5, 0.5)


@pytest.mark.parametrize("size", [6, 7, 12, 25])
def test_the_interval_covers_the_true_median_as_often_as_it_says(size: int) -> None:
    draws = np.random.default_rng(3).lognormal(0, 0.05, size=(400, size))
    intervals = [median_interval(draw.tolist()) for draw in draws]
    assert sum(interval is not None and 1.0 in interval for interval in intervals) >= 0.94 * 400


@pytest.mark.parametrize(
    ("samples", "heading"),
    [([], "95%"), ([1], "95%"), ([2], "50%"), ([3, 7], "75%"), ([9, 1, 5], "94%"), ([6], "95%"),
     ([10_000], "95%")],
)  # fmt: skip
def test_the_heading_names_the_confidence_that_is_reached(samples: list[int], heading: str) -> None:
    """By the row with the fewest samples among those with an interval."""
    assert interval_heading(samples) == f"{heading}\ninterval"


def test_outliers_by_the_modified_z_score() -> None:
    # median 10, MAD 1: |x - 10| * 0.6745 > 3.5 means further away than 5.19.
    assert outliers([9, 10, 11, 10, 15.18, 8, 12]) == []
    assert outliers([9, 10, 11, 10, 15.20, 8, 12]) == [4]
    mad = scipy_stats.median_abs_deviation([9, 10, 11, 10, 15.2, 8, 12])
    assert mad == 1


def test_outliers_where_most_values_are_equal() -> None:
    # MAD 0; mean deviation 10 / 7, so the score of 20 is 10 / (1.2533 * 10 / 7) = 5.6.
    assert outliers([10, 10, 10, 10, 10, 10, 20]) == [6]
    assert outliers([10, 10, 10, 10, 10, 20]) == [5]
    assert outliers([10] * 6) == []


def test_a_paired_ratio_cancels_what_disturbs_both() -> None:
    slow_machine = [1.0, 5.0, 0.2, 3.0]
    result = paired_log_ratio([2 * x for x in slow_machine], slow_machine)
    assert result.ratio == pytest.approx(2)
    assert result.interval is not None
    assert (result.interval.low, result.interval.high) == pytest.approx((2, 2))
    assert result.samples == 4


def test_a_paired_ratio_by_hand() -> None:
    # ratios 1/2, 2, 8: median of logs is log 2; the interval of three pairs is their range.
    result = paired_log_ratio([1, 4, 8], [2, 2, 1])
    assert result.ratio == pytest.approx(2)
    assert result.interval is not None
    assert (result.interval.low, result.interval.high) == pytest.approx((0.5, 8))
    assert paired_log_ratio([3], [2]).interval is None


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=9))
def test_swapping_a_pair_inverts_the_ratio(pairs: list[tuple[float, float]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    assert paired_log_ratio(a, b).ratio == pytest.approx(1 / paired_log_ratio(b, a).ratio)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1, 2], [1], "argument 2 is shorter"),
        ([], [], "no values"),
        ([1, 0], [1, 1], "domain error|positive"),
        ([1], [-1], "domain error|positive"),
    ],
)
def test_what_cannot_be_paired_is_refused(a: list[float], b: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_log_ratio(a, b)


def test_hubers_mean() -> None:
    """It is the mean where values are alike, and an outlier counts as one that is less far."""
    assert huber_mean([1.0, 2.0, 3.0, 4.0]) == pytest.approx(2.5)
    assert huber_mean([1.0, 1.02, 0.98, 1.01, 0.99, 9.0]) < 1.02
    assert huber_mean([5.0, 5.0]) == 5.0


def test_a_steady_state_by_hand() -> None:
    # 90, 100, 110, 100, 100: mean 100, range 20%; the fitted slope is 2 per round, 8% in all.
    steady = steady_state([1, 90, 100, 110, 100, 100])
    assert steady is not None
    assert (steady.range, steady.slope) == pytest.approx((0.20, 0.08))
    assert steady.steady
    assert scipy_stats.linregress(range(5), [90, 100, 110, 100, 100]).slope == pytest.approx(2)


@pytest.mark.parametrize(
    ("rounds", "why"),
    [([88, 100, 112, 100, 100], "range 24%"), ([106, 103, 100, 97, 94], "drifts by 12%")],
)
def test_what_is_not_steady(rounds: list[float], why: str) -> None:
    steady = steady_state(rounds)
    assert steady is not None, why
    assert not steady.steady, why
