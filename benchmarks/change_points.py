"""How often a change of the rate is found where there is none, and where there is one.

    python benchmarks/change_points.py [--runs 1000] [--seed 20261128]

Prints the Markdown tables of docs/statistics.md. Nothing is measured: the rates are drawn.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from iobench.stats.change import find_change

_Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


def correlated(part: float, spread: float) -> _Draw:
    """Noise in which each save has the correlation `part` with the one before it."""

    def draw(random: np.random.Generator, saves: int) -> NDArray[np.float64]:
        values = random.normal(0, spread, saves)
        for at in range(1, saves):
            values[at] = part * values[at - 1] + math.sqrt(1 - part**2) * values[at]
        return values

    return draw


NOISES: dict[str, _Draw] = {
    "normal, 5%": lambda random, n: random.normal(0, 0.05, n),
    "normal, 20%": lambda random, n: random.normal(0, 0.2, n),
    "heavy tails: Student's t, 2 degrees of freedom, times 5%": (
        lambda random, n: 0.05 * random.standard_t(2, n)
    ),
    "two-valued: three of ten saves take twice as long": (
        lambda random, n: random.normal(0, 0.01, n) - math.log(2) * (random.random(n) < 0.3)
    ),
    "correlation of 0.5 with the save before, 10%": correlated(0.5, 0.1),
    "correlation of 0.8 with the save before, 20%": correlated(0.8, 0.2),
}
_COUNTS = (8, 12, 40, 120)
_DROPS = (1.2, 1.5, 4.0)
_BEFORE, _SAVES = 5, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=20261128)
    args = parser.parse_args()
    runs = args.runs
    print(f"| noise of a save | {' | '.join(f'{n} saves' for n in _COUNTS)} |")
    print("| --- |" + " ---: |" * len(_COUNTS))
    for name, draw in NOISES.items():
        random, cells = np.random.default_rng(args.seed), []
        for count in _COUNTS:
            series = (np.exp(draw(random, count)).tolist() for _ in range(runs))
            cells.append(f"{sum(find_change(one) is not None for one in series) / runs:.1%}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\n| noise of a save | {' | '.join(f'{drop:g}x faster' for drop in _DROPS)} |")
    print("| --- |" + " ---: |" * len(_DROPS))
    for name, draw in NOISES.items():
        random, cells = np.random.default_rng(args.seed), []
        for drop in _DROPS:
            found = held = 0
            for _ in range(runs):
                logs = draw(random, _SAVES)
                logs[:_BEFORE] += math.log(drop)
                change = find_change(np.exp(logs).tolist())
                found += change is not None
                held += change is not None and change.low <= _BEFORE <= change.high
            cells.append(f"{found / runs:.1%}, {held / max(found, 1):.0%}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
