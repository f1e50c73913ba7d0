"""Runs are compared by their levels, and the spread between them is the floor."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as scipy_stats

from iobench.bench.judging.between_runs import compare_levels, control_floor, level
from iobench.bench.judging.comparison import Finding
from iobench.results import read

EXAMPLE = read(Path(__file__).parents[1] / "results" / "example.jsonl")
SAVE = next(sample for sample in EXAMPLE.samples if sample.operation == "save")


@pytest.mark.parametrize(("new", "old"), [(2, 2), (2, 5), (5, 3), (6, 6)])
def test_the_interval_is_that_of_students_test(new: int, old: int) -> None:
    random = np.random.default_rng([new, old])
    a, b = random.lognormal(0, 0.05, new), random.lognormal(0.1, 0.1, old)
    found = compare_levels(a.tolist(), b.tolist())
    expected = scipy_stats.ttest_ind(np.log(a), np.log(b))
    low, high = expected.confidence_interval(0.952)
    assert found.ratio.interval is not None
    assert found.ratio.interval.low == pytest.approx(math.exp(low), rel=1e-3)
    assert found.ratio.interval.high == pytest.approx(math.exp(high), rel=1e-3)
    assert found.ratio.samples == new + old
    assert (found.finding is not Finding.NONE) == (
        expected.pvalue < 0.048 and abs(math.log(found.ratio.ratio)) > math.log1p(0.02)
    )


def test_one_run_is_compared_by_the_spread_of_the_others() -> None:
    """The interval of levels 98, 100, 102 and 104 is 9.5% wider for one more run."""
    old = [98.0, 100.0, 102.0, 104.0]
    assert compare_levels([93.0], old).finding is Finding.NONE
    assert compare_levels([85.0], old).finding is Finding.WORSE
    assert compare_levels(old, [85.0]).finding is Finding.BETTER
    spread = np.std(np.log(old), ddof=1) * math.sqrt(1 + 1 / 4) * scipy_stats.t.ppf(0.976, 3)
    assert compare_levels([90.0], old).floor == pytest.approx(math.expm1(spread), rel=1e-3)


def test_equal_runs_show_nothing_below_two_percent() -> None:
    assert compare_levels([1.0, 1.0], [1.015, 1.015]).finding is Finding.NONE
    assert compare_levels([1.0, 1.0], [1.03, 1.03]).finding is Finding.WORSE


def test_one_run_a_side_has_no_spread() -> None:
    with pytest.raises(ValueError, match="two runs or more"):
        compare_levels([1.0], [1.0])


def test_a_stall_does_not_move_the_level_of_a_run() -> None:
    def taking(*seconds: float) -> float:
        return level(replace(SAVE, repetition=n, elapsed_s=s) for n, s in enumerate(seconds))

    steady = taking(1.0, 1.02, 0.98, 1.01, 0.99, 1.0)
    assert taking(1.0, 1.02, 0.98, 1.01, 0.99, 9.0) == pytest.approx(steady, rel=0.02)
    assert taking(2.0, 2.0) == pytest.approx(SAVE.bytes / 2)


@pytest.mark.parametrize(
    ("ratio", "controls", "floor"),
    [(0.9, [], 0.05), (0.9, [0.8], 0.3125), (0.9, [1.25], 0.05), (1.2, [1.25, 0.5], 0.3125)],
)
def test_controls_raise_the_floor_where_they_moved_the_same_way(
    ratio: float, controls: list[float], floor: float
) -> None:
    assert control_floor(0.05, ratio, controls) == pytest.approx(floor)
