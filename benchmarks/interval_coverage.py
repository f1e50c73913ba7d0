"""How often intervals hold the true median, for fixed numbers of repetitions and `--repeat auto`.

    python benchmarks/interval_coverage.py [--runs 4000] [--seed 20261122]

Prints the Markdown table of docs/statistics.md. Nothing is measured: the rates are drawn.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import numpy as np

from iobench.bench.judging.repeat import Repeat
from iobench.stats.estimates import median, median_interval

_MOST = 300
_NOISES: dict[str, Callable[[np.random.Generator], Sequence[float]]] = {
    "3%": lambda random: random.normal(0, 0.03, _MOST),
    "5%": lambda random: random.normal(0, 0.05, _MOST),
    "heavy tails: Student's t, 3 degrees of freedom, times 5%": (
        lambda random: 0.05 * random.standard_t(3, _MOST)
    ),
    "skewed: exponential, times 8%": (
        lambda random: 0.08 * (random.exponential(1, _MOST) - math.log(2))
    ),
}


def stop(repeat: Repeat, rates: Sequence[float]) -> int:
    """After how many repetitions `repeat` stops when one series of these rates is measured."""
    precision = repeat.precision
    assert precision is not None
    for done in range(repeat.times, len(rates)):
        counted = rates[: repeat.deciding(done)]
        interval = median_interval(counted)
        assert interval is not None
        if interval.high - interval.low <= precision * median(counted):
            return done
    return len(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=20261122)
    args = parser.parse_args()
    runs = args.runs
    auto = Repeat.parse("auto", "5%", "10min")
    print("| noise of a sample | n = 6 | n = 7 | n = 12 | auto, 5% | its repetitions |")
    print("|---|---|---|---|---|---|")
    for name, draw in _NOISES.items():
        random = np.random.default_rng(args.seed)
        held, taken = np.zeros(4), 0
        for _ in range(runs):
            rates = np.exp(draw(random)).tolist()
            stopped = stop(auto, rates)
            taken += stopped
            for column, count in enumerate((6, 7, 12, stopped)):
                interval = median_interval(rates[:count])
                held[column] += interval is not None and 1.0 in interval
        cells = " | ".join(f"{100 * part:.1f}%" for part in held / runs)
        print(f"| {name} | {cells} | {taken / runs:.0f} |", flush=True)
    print(f"\nstandard error of 95%: {100 * math.sqrt(0.95 * 0.05 / runs):.1f}%")


if __name__ == "__main__":
    main()
