"""A difference is shown if its interval is beyond the floor; A/A comparisons show none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from iobench.results import Sample, read
from iobench.stats.comparison import (
    LEAST_FLOOR,
    Comparison,
    Finding,
    compare_paired,
    compare_runs,
    fastest,
    noise_floor,
)
from iobench.stats.estimates import Interval, Ratio

EXAMPLE = read(Path(__file__).parents[1] / "results" / "example.jsonl")
SAVE = next(sample for sample in EXAMPLE.samples if sample.operation == "save")
REFERENCE = read(Path(__file__).parents[1] / "results" / "recorded.jsonl")


def taking(seconds: Sequence[float], *, first: int = 0) -> list[Sample]:
    """One save per repetition, with these durations."""
    return [
        replace(SAVE, repetition=number, elapsed_s=elapsed)
        for number, elapsed in enumerate(seconds, first)
    ]


def _rates(samples: Sequence[Sample]) -> list[float]:
    return [sample.bytes / sample.elapsed_s for sample in samples]


def difference(low: float, high: float, *, samples: int = 5, floor: float = 0.03) -> Comparison:
    ratio = Ratio(ratio=(low * high) ** 0.5, interval=Interval(low, high), samples=samples)
    return Comparison(ratio=ratio, floor=floor)


@pytest.mark.parametrize(
    ("low", "high", "finding"),
    [
        (1.031, 2, Finding.BETTER),
        (1.03, 2, Finding.NONE),
        (0.9, 1.2, Finding.NONE),
        (0.5, 0.971, Finding.NONE),
        (0.5, 0.970, Finding.WORSE),
    ],
)
def test_the_whole_interval_must_lie_beyond_the_floor(
    low: float, high: float, finding: Finding
) -> None:
    assert difference(low, high).finding is finding


def test_four_repetitions_show_no_difference() -> None:
    assert difference(2, 3, samples=4).finding is Finding.NONE
    one = Comparison(ratio=Ratio(ratio=9, interval=None, samples=9), floor=0)
    assert one.finding is Finding.NONE


def test_pairs_by_repetition_by_hand() -> None:
    # The disk gets slower and slower; the baseline always takes twice as long.
    result = compare_paired(taking([1, 2, 4, 8, 16, 99]), taking([4, 8, 16, 32, 2], first=1))
    assert result is not None
    assert result.ratio.samples == 5  # repetition 0 has no partner
    assert result.ratio.ratio == pytest.approx(2)
    assert result.floor == LEAST_FLOOR
    assert compare_paired(taking([1]), taking([1], first=1)) is None


def test_two_samples_of_one_repetition_count_as_one() -> None:
    twice = taking([1, 1, 1, 1, 1]) + taking([3, 3, 3, 3, 3])
    result = compare_paired(twice, taking([2, 2, 2, 2, 2]))
    assert result is not None
    assert result.ratio.ratio == pytest.approx(1)


def test_the_noise_floor_by_hand() -> None:
    first, second = taking([1] * 5), taking([1, 1.02, 0.96, 1.01, 1])
    floor = noise_floor([*first, *second])
    assert floor == pytest.approx(1 / 0.96 - 1)  # the interval of five pairs is their range


def test_a_winner_is_named_only_when_its_interval_clears_the_floor() -> None:
    steady = taking([2.00, 2.01, 1.99, 2.00, 2.00])
    clear = taking([1.00, 1.01, 0.99, 1.00, 1.00])
    close = taking([1.01, 1.00, 1.01, 1.00, 1.01])
    won = fastest([steady, clear])
    assert (won.first, won.equals) == (1, ())
    tied = fastest([steady, clear, close])
    assert (tied.first, tied.equals) == (1, (2,))
    assert fastest([steady, clear], floor=1.5).equals == (0,)


def test_no_floor_without_twins_or_with_few() -> None:
    assert noise_floor(taking([1, 2, 3, 4, 5])) is None
    assert noise_floor(taking([1] * 4) + taking([1] * 4)) is None


@pytest.mark.slow
@pytest.mark.parametrize("repetitions", [5, 6, 7, 10])
@pytest.mark.parametrize("spread", [0.01, 0.05, 0.2])
def test_nineteen_of_twenty_comparisons_of_a_contender_with_itself_show_nothing(
    repetitions: int, spread: float
) -> None:
    """Within a run and between runs, for any noise; 1 of 20 may err, out of 200."""
    random = np.random.default_rng([repetitions, int(1000 * spread)])
    wrong = {"paired": 0, "runs": 0}
    for _ in range(200):
        a, b = (taking(random.lognormal(0, spread, repetitions)) for _ in "ab")
        paired = compare_paired(a, b)
        assert paired is not None
        wrong["paired"] += paired.finding is not Finding.NONE
        wrong["runs"] += compare_runs([_rates(a)], [_rates(b)]).finding is not Finding.NONE
    assert max(wrong.values()) <= 10, wrong


@pytest.mark.slow
@pytest.mark.parametrize("contenders", [2, 6, 12])
@pytest.mark.parametrize("noise", ["normal", "heavy", "two-valued"])
def test_equal_contenders_have_no_winner(contenders: int, noise: str) -> None:
    """A difference of any kind is shown in at most 5% of runs; three standard errors are added.

    Of 200 runs each. docs/statistics.md has the shares of 2,000.
    """
    random = np.random.default_rng([contenders, len(noise)])
    size = contenders, 6
    wrong = 0
    for _ in range(200):
        logs = {
            "normal": lambda: random.normal(0, 0.1, size),
            "heavy": lambda: 0.05 * random.standard_t(2, size),
            "two-valued": lambda: 0.7 * (random.random(size) < 0.3) + random.normal(0, 0.02, size),
        }[noise]()
        found = fastest([taking(times) for times in np.exp(logs)])
        wrong += len(found.equals) < contenders - 1
    assert wrong <= 200 * (0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5)


@pytest.mark.parametrize("operation", ["save", "restore"])
@pytest.mark.parametrize("writer", ["buffered", "uncached", "odirect"])
def test_recorded_samples_compared_with_themselves(writer: str, operation: str) -> None:
    """Samples recorded on this machine are drawn for A and B 20 times: 19 times no difference is
    shown."""
    recorded = [
        sample
        for sample in REFERENCE.samples
        if (sample.writer, sample.operation) == (writer, operation)
    ]
    random = np.random.default_rng(7)
    wrong = 0
    for _ in range(20):
        a, b = (
            taking([recorded[i].elapsed_s for i in random.integers(0, len(recorded), 5)])
            for _ in "ab"
        )
        paired = compare_paired(a, b)
        assert paired is not None
        found = {paired.finding, compare_runs([_rates(a)], [_rates(b)]).finding}
        wrong += found != {Finding.NONE}
    assert wrong <= 1
