"""How often `iobench compare` errs: false alarms on equal code, and its power on slower code.

    python benchmarks/compare_errors.py [--trials 40000] [--seed 20261122]

Prints the Markdown table of docs/statistics.md. Nothing is measured: rates are drawn, with an
offset of 5% a run and noise of 5% a sample. Welch's t test on the means of runs and the
resampling of runs and then samples are next to it, at 95% each.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from iobench.bench.judging.between_runs import compare_levels, huber_mean
from iobench.bench.judging.comparison import LEAST_FLOOR, Difference, Finding
from iobench.bench.judging.stats import independent_log_ratio

_OFFSET, _NOISE, _THRESHOLD = 0.05, 0.05, 0.05
_CHANGES = (0.0, -0.05, -0.10)
_SAMPLES, _RESAMPLES, _RESAMPLED = 6, 400, 300
_Array = NDArray[np.float64]


def draw(random: np.random.Generator, runs: int, trials: int, *, tails: bool) -> _Array:
    """Logarithms of rates: by trial, run and sample."""
    shape = (trials, runs, _SAMPLES)
    noise = random.standard_t(3, shape) if tails else random.normal(0, 1, shape)
    return np.asarray(random.normal(0, _OFFSET, (trials, runs, 1)) + _NOISE * noise)


def ours(new: _Array, old: _Array) -> Iterable[tuple[bool, bool]]:
    """Whether compare shows a difference, and a regression by more than 5%, for each trial."""
    if new.shape[1] == 1:
        for one, other in zip(np.exp(new[:, 0]), np.exp(old[:, 0]), strict=True):
            ratio = independent_log_ratio(one.tolist(), other.tolist())
            found = Difference(ratio=ratio, floor=LEAST_FLOOR)
            yield found.finding is not Finding.NONE, _regression(found.finding, ratio.ratio)
        return
    sides = (np.exp(huber_mean(side)) for side in (new, old))
    for levels in zip(*sides, strict=True):
        shown = compare_levels(*(one.tolist() for one in levels))
        yield shown.finding is not Finding.NONE, _regression(shown.finding, shown.ratio.ratio)


def _regression(finding: Finding, ratio: float) -> bool:
    return finding is Finding.WORSE and ratio < 1 - _THRESHOLD


def welch(new: _Array, old: _Array) -> float:
    """How often Welch's t test on the mean rates of runs rejects equality at 5%."""
    from scipy import stats

    means = (np.exp(side).mean(axis=2) for side in (new, old))
    return float(np.mean(stats.ttest_ind(*means, axis=1, equal_var=False).pvalue < 0.05))


def resampled(random: np.random.Generator, new: _Array, old: _Array) -> float:
    """How often 95% of the ratios of resampled medians exclude 1: runs first, then samples."""
    excluded = 0
    for sides in zip(new, old, strict=True):
        medians = []
        for side in sides:
            runs = random.integers(0, len(side), (_RESAMPLES, len(side), 1))
            picks = random.integers(0, _SAMPLES, (_RESAMPLES, len(side), _SAMPLES))
            medians.append(np.median(np.median(side[runs, picks], axis=2), axis=1))
        low, high = np.quantile(medians[0] - medians[1], [0.025, 0.975])
        excluded += low > 0 or high < 0
    return excluded / len(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=20261122)
    args = parser.parse_args()
    print("| runs a side | noise | change | difference shown | regression | Welch | resampled |")
    print("|---|---|---|---|---|---|---|")
    for runs in (1, 2, 3, 4, 6, 8):
        for tails in (False, True):
            random = np.random.default_rng([args.seed, runs, tails])
            new = draw(random, runs, args.trials, tails=tails)
            old = draw(random, runs, args.trials, tails=tails)
            for change in _CHANGES:
                slower = new + math.log1p(change)
                shown = np.mean(list(ours(slower, old)), axis=0)
                few = resampled(random, slower[:_RESAMPLED], old[:_RESAMPLED])
                cells = [*shown, *([welch(slower, old)] if runs > 1 else []), few]
                figures = [f"{100 * part:.1f}%" for part in cells]
                if runs == 1:
                    figures.insert(2, "-")
                noise = "t, 3 degrees of freedom" if tails else "normal"
                print(
                    f"| {runs} | {noise} | {100 * change:.0f}% | {' | '.join(figures)} |",
                    flush=True,
                )
    for trials in (args.trials, min(args.trials, _RESAMPLED)):
        error = math.sqrt(0.05 * 0.95 / trials)
        print(f"\nstandard error of 5% in {trials} trials: {100 * error:.2f}%")


if __name__ == "__main__":
    main()
