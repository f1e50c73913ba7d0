"""How often `iobench compare` errs: false alarms on equal code, and its power on slower code.

    python benchmarks/compare_errors.py [--trials 2000]

Prints the Markdown table of docs/statistics.md. Nothing is measured: rates are drawn, with an
offset of 5% a run and noise of 5% a sample. Welch's t test on the means of runs and the
resampling of runs and then samples are next to it, at 95% each.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
from numpy.typing import NDArray

from iobench.bench.judging.between_runs import RunsDifference, compare_levels, level
from iobench.bench.judging.comparison import Difference, Finding, compare_runs
from iobench.results import Sample, Setting

_OFFSET, _NOISE, _THRESHOLD = 0.05, 0.05, 0.05
_SAMPLES, _RESAMPLES = 6, 400
_Rates = NDArray[np.float64]


def draw(random: np.random.Generator, runs: int, change: float, *, tails: bool) -> _Rates:
    """Rates of so many runs, a row each."""
    shape = (runs, _SAMPLES)
    noise = random.standard_t(3, shape) if tails else random.normal(0, 1, shape)
    logs = random.normal(0, _OFFSET, (runs, 1)) + _NOISE * noise
    return np.asarray((1 + change) * np.exp(logs))


def samples_of(rates: _Rates) -> list[Sample]:
    return [
        Sample(
            run_id="0" * 16,
            repetition=number,
            order=0,
            setting=Setting(writer="odirect", options={}),
            operation="save",
            bytes=1,
            elapsed_s=1 / rate,
            first_done_s=0,
            last_done_s=0,
            phases_s={},
            paths={},
            cpu_s=0,
            system_cpu_s=None,
            started_at="2026-01-01T00:00:00Z",
        )
        for number, rate in enumerate(rates.tolist())
    ]


def ours(new: _Rates, old: _Rates) -> tuple[bool, bool]:
    """Whether compare shows a difference, and whether that is a regression by more than 5%."""
    found: RunsDifference | Difference
    if len(new) == len(old) == 1:
        found = compare_runs(samples_of(new[0]), samples_of(old[0]))
    else:
        sides = [[level(samples_of(run)) for run in side] for side in (new, old)]
        found = compare_levels(*sides)
    worse = found.finding is Finding.WORSE and found.ratio.ratio < 1 - _THRESHOLD
    return found.finding is not Finding.NONE, worse


def welch(new: _Rates, old: _Rates) -> bool:
    """Whether Welch's t test on the mean rates of runs rejects equality at 5%."""
    from scipy import stats

    if len(new) < 2:
        return False
    return bool(stats.ttest_ind(new.mean(axis=1), old.mean(axis=1), equal_var=False).pvalue < 0.05)


def resampled(random: np.random.Generator, new: _Rates, old: _Rates) -> bool:
    """Whether 95% of ratios exclude 1, of medians of runs and then samples that are resampled."""
    medians = []
    for side in (new, old):
        runs = random.integers(0, len(side), (_RESAMPLES, len(side), 1))
        picks = random.integers(0, _SAMPLES, (_RESAMPLES, len(side), _SAMPLES))
        medians.append(np.median(np.median(np.log(side)[runs, picks], axis=2), axis=1))
    low, high = np.quantile(medians[0] - medians[1], [0.025, 0.975])
    return bool(low > 0 or high < 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=2000)
    trials = parser.parse_args().trials
    print("| runs a side | noise | change | difference shown | regression | Welch | resampled |")
    print("|---|---|---|---|---|---|---|")
    for runs in (1, 2, 3, 5, 8):
        for tails in (False, True) if runs in (3, 5) else (False,):
            for change in (0.0, -0.05, -0.10):
                random = np.random.default_rng([20260131, runs, tails])
                shown = np.zeros(4)
                for _ in range(trials):
                    new = draw(random, runs, change, tails=tails)
                    old = draw(random, runs, 0.0, tails=tails)
                    shown += [*ours(new, old), welch(new, old), resampled(random, new, old)]
                cells = [f"{100 * part / trials:.1f}%" for part in shown]
                if runs == 1:
                    cells[2] = "-"
                noise = "t, 3 degrees of freedom" if tails else "normal"
                print(
                    f"| {runs} | {noise} | {100 * change:.0f}% | {' | '.join(cells)} |",
                    flush=True,
                )
    error = math.sqrt(0.05 * 0.95 / trials)
    print(f"\nstandard error of 5%: {100 * error:.1f}%")


if __name__ == "__main__":
    main()
