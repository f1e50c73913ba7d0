"""How often `iobench compare` errs: false alarms on equal code, and its power on slower code.

    python benchmarks/compare_errors.py [--commands 2000] [--seed 20261124]

Prints the Markdown table of docs/statistics.md. Nothing is measured: rates are drawn. A command
compares 3 writers in saves and restores, 6 rows, with 6 repetitions a run and `--threshold 5%`.
Runs of normal noise and of heavy tails have an offset of 5% each, by row.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
from numpy.typing import NDArray

from iobench.stats.comparison import Comparison, Finding, compare_runs

_ROWS, _SAMPLES = 6, 6
_OFFSET, _NOISE, _THRESHOLD = 0.05, 0.05, 0.05
_CHANGES = (-0.10, -0.20, -0.40)
_NOISES = {
    "normal, 5%": lambda random, shape: _NOISE * random.normal(0, 1, shape),
    "Student's t with 3 degrees of freedom, times 5%": lambda random, shape: (
        _NOISE * random.standard_t(3, shape)
    ),
    "3 of 10 samples take twice as long": lambda random, shape: _slow(random, shape, 0.3),
    "half of the samples take twice as long": lambda random, shape: _slow(random, shape, 0.5),
}
_Array = NDArray[np.float64]


def _slow(random: np.random.Generator, shape: tuple[int, ...], part: float) -> _Array:
    slow = random.random(shape) < part
    return np.asarray(random.normal(0, 0.02, shape) - math.log(2) * slow)


def draw(random: np.random.Generator, noise: str, shape: tuple[int, ...]) -> _Array:
    """Rates by command, side, row, run and repetition."""
    logs = _NOISES[noise](random, shape)
    if not noise.endswith("as long"):
        logs = logs + random.normal(0, _OFFSET, (*shape[:-1], 1))
    return np.exp(logs)


def is_regression(found: Comparison) -> bool:
    return found.finding is Finding.WORSE and found.ratio.ratio < 1 - _THRESHOLD


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commands", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=20261124)
    args = parser.parse_args()
    found_at = " | ".join(f"found at {100 * change:.0f}%" for change in _CHANGES)
    print(f"| runs a side | noise | difference shown | regression | {found_at} |")
    print("| --- | --- |" + " ---: |" * (2 + len(_CHANGES)))
    for runs in (1, 2, 3, 4, 6):
        for noise in _NOISES:
            random = np.random.default_rng([args.seed, runs, len(noise)])
            shape = args.commands, 2, _ROWS, runs, _SAMPLES
            counts = np.zeros(2 + len(_CHANGES))
            for new, old in draw(random, noise, shape):
                rows = [compare_runs(a, b, rows=_ROWS) for a, b in zip(new, old, strict=True)]
                slower = (
                    compare_runs(new[0] * (1 + change), old[0], rows=_ROWS) for change in _CHANGES
                )
                counts += [
                    any(one.finding is not Finding.NONE for one in rows),
                    any(map(is_regression, rows)),
                    *map(is_regression, slower),
                ]
            figures = [f"{100 * count / args.commands:.1f}%" for count in counts]
            print(f"| {runs} | {noise} | {' | '.join(figures)} |", flush=True)
    error = math.sqrt(0.05 * 0.95 / args.commands)
    print(f"\nstandard error of 5% in {args.commands} commands: {100 * error:.2f}%")


if __name__ == "__main__":
    main()
