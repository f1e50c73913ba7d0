"""The statistics against figures worked out by hand and by scipy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from iobench.bench.stats import (
    Interval,
    bootstrap_median_interval,
    median,
    outliers,
    paired_log_ratio,
    rate,
)

positive = st.floats(1e-3, 1e12)


def test_a_rate_is_total_over_total() -> None:
    assert rate(100 + 100, 1 + 4) == 40  # the mean of the rates 100 and 25 would be 62.5


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_rate_needs_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="time above zero"):
        rate(1, seconds)


def test_median() -> None:
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
    assert median([7]) == 7


@pytest.mark.parametrize("values", [[], [1, math.nan], [math.inf]])
def test_what_has_no_median_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="value"):
        median(values)


def test_one_value_has_no_interval() -> None:
    assert bootstrap_median_interval([5.0]) is None


def test_few_values_have_their_range_for_an_interval() -> None:
    # P(median of a resample of 5 is the smallest) = P(Binomial(5, 1/5) >= 3) = 5.8 % > 2.5 %.
    assert bootstrap_median_interval([1, 2, 3, 4, 5]) == Interval(1, 5)
    assert bootstrap_median_interval([1, 2]) == Interval(1, 2)


def test_the_interval_is_the_exact_one_of_the_bootstrap_distribution() -> None:
    # Of 11 values, P(median of a resample <= x_k) = P(Binomial(11, k/11) >= 6). The smallest k
    # where it reaches 2.5 % is 3, and by symmetry 9 at the other end.
    assert scipy_stats.binom.sf(5, 11, 2 / 11) < 0.025 < scipy_stats.binom.sf(5, 11, 3 / 11)
    assert bootstrap_median_interval(range(1, 12)) == Interval(3, 9)


def test_the_interval_agrees_with_scipy() -> None:
    values = np.random.default_rng(1).lognormal(size=60)
    ours = bootstrap_median_interval(values.tolist(), resamples=20_000)
    theirs = scipy_stats.bootstrap(
        (values,), np.median, n_resamples=20_000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    assert ours is not None
    assert ours.low == pytest.approx(theirs.low, rel=0.03)
    assert ours.high == pytest.approx(theirs.high, rel=0.03)


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    draws = np.random.default_rng(3).normal(10, 1, size=(400, 25))
    intervals = [bootstrap_median_interval(draw.tolist(), resamples=1000) for draw in draws]
    covered = sum(interval is not None and 10.0 in interval for interval in intervals)
    assert 0.91 * 400 <= covered <= 0.99 * 400


@given(st.lists(positive, min_size=2, max_size=12), st.floats(0.5, 0.99))
def test_the_interval_is_repeatable_and_within_the_values(
    values: list[float], confidence: float
) -> None:
    interval = bootstrap_median_interval(values, confidence, resamples=200)
    assert interval == bootstrap_median_interval(values, confidence, resamples=200)
    assert interval is not None
    assert min(values) * (1 - 1e-12) <= interval.low <= interval.high
    assert interval.high <= max(values) * (1 + 1e-12)


@pytest.mark.parametrize("confidence", [0, 1, 95])
def test_a_confidence_is_a_fraction(confidence: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        bootstrap_median_interval([1, 2], confidence)


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


def test_four_values_have_no_outliers() -> None:
    assert outliers([1, 1, 1, 1000]) == []


def test_a_paired_ratio_cancels_what_disturbs_both() -> None:
    slow_machine = [1.0, 5.0, 0.2, 3.0]
    result = paired_log_ratio([2 * x for x in slow_machine], slow_machine)
    assert result.ratio == pytest.approx(2)
    assert result.interval is not None
    assert (result.interval.low, result.interval.high) == pytest.approx((2, 2))
    assert result.pairs == 4


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
    assert paired_log_ratio(a, b, resamples=50).ratio == pytest.approx(
        1 / paired_log_ratio(b, a, resamples=50).ratio
    )


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1, 2], [1], "series of one length, not 2 and 1"),
        ([], [], "no values"),
        ([1, 0], [1, 1], "values above zero"),
        ([1], [-1], "values above zero"),
    ],
)
def test_what_cannot_be_paired_is_refused(a: list[float], b: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_log_ratio(a, b)
