"""How often the statistics err where the truth is known. Nothing is measured: rates are drawn.

    python benchmarks/error_rates.py intervals   how often an interval holds the true median
    python benchmarks/error_rates.py compare     false alarms of `iobench compare`, and its power
    python benchmarks/error_rates.py changes     changes found where there is none, or one
    PYTHONPATH=tests python benchmarks/error_rates.py autotune   wrong winners, simulated storage

Options: `--runs N` and `--seed N`. Prints the Markdown tables of docs/statistics.md and of
docs/autotune.md.

`compare`: a command compares 3 writers in saves and restores, 6 rows, with 6 repetitions a run and
`--threshold 5%`. Runs of normal noise and of heavy tails have an offset of 5% each, by row.
`autotune`: a winner is wrong whose rate is more than 5% below the best of the whole space, at the
confirmed size and at the end of the tuning. A cell has the tunings that decided, and how many
winners were wrong: with a decision + without one.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from arms import markdown
from numpy.typing import NDArray

from iobench.bench.judging.repeat import Repeat
from iobench.stats.comparison import Comparison, Finding, compare_runs
from iobench.stats.estimates import median, median_interval
from iobench.stats.over_time import find_change

_HILLS = "another hill for each seed"
_Array = NDArray[np.float64]
_Draw = Callable[[np.random.Generator, tuple[int, ...]], _Array]
"""Logarithms of rates, of a shape."""


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print each row as it comes."""
    for line in markdown(head, rows):
        print(line, end="", flush=True)


def normal(spread: float) -> _Draw:
    return lambda random, shape: random.normal(0, spread, shape)


def student(freedom: int, spread: float) -> _Draw:
    return lambda random, shape: spread * random.standard_t(freedom, shape)


def two_valued(part: float, spread: float) -> _Draw:
    """This part of the samples takes twice as long."""

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> _Array:
        slow = random.random(shape) < part
        return np.asarray(random.normal(0, spread, shape) - math.log(2) * slow)

    return draw


def correlated(part: float, spread: float) -> _Draw:
    """Noise in which each save has the correlation `part` with the one before it."""

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> _Array:
        values = random.normal(0, spread, shape)
        for at in range(1, len(values)):
            values[at] = part * values[at - 1] + math.sqrt(1 - part**2) * values[at]
        return values

    return draw


def intervals(asked: argparse.Namespace) -> None:
    """For fixed numbers of repetitions and for `--repeat auto`."""
    most, auto = 300, Repeat.parse("auto", "5%", "10min")
    noises = {
        "3%": normal(0.03),
        "5%": normal(0.05),
        "heavy tails: Student's t, 3 degrees of freedom, times 5%": student(3, 0.05),
        "skewed: exponential, times 8%": (
            lambda random, shape: 0.08 * (random.exponential(1, shape) - math.log(2))
        ),
    }

    def rows() -> Iterator[Sequence[str]]:
        for name, draw in noises.items():
            random = np.random.default_rng(asked.seed)
            held, taken = np.zeros(4), 0
            for _ in range(asked.runs):
                rates = np.exp(draw(random, (most,))).tolist()
                stopped = _stop(auto, rates)
                taken += stopped
                for column, count in enumerate((6, 7, 12, stopped)):
                    interval = median_interval(rates[:count])
                    held[column] += interval is not None and 1.0 in interval
            cells = [f"{100 * part:.1f}%" for part in held / asked.runs]
            yield [name, *cells, f"{taken / asked.runs:.0f}"]

    columns = ("n = 6", "n = 7", "n = 12", "auto, 5%", "its repetitions")
    print_table(["noise of a sample", *columns], rows())


def _stop(repeat: Repeat, rates: Sequence[float]) -> int:
    """After how many repetitions `repeat` stops when one series of these rates is measured."""
    for done in range(repeat.times, len(rates)):
        counted = rates[: repeat.deciding(done)]
        interval = median_interval(counted)
        if interval.high - interval.low <= repeat.precision * median(counted):
            return done
    return len(rates)


def compare(asked: argparse.Namespace) -> None:
    """False alarms on equal code, and power on slower code."""
    comparisons, samples, offset, threshold = 6, 6, 0.05, 0.05
    changes = (-0.10, -0.20, -0.40)
    noises = {
        "normal, 5%": (normal(0.05), offset),
        "Student's t with 3 degrees of freedom, times 5%": (student(3, 0.05), offset),
        "3 of 10 samples take twice as long": (two_valued(0.3, 0.02), 0),
        "half of the samples take twice as long": (two_valued(0.5, 0.02), 0),
    }

    def is_regression(found: Comparison) -> bool:
        return found.finding is Finding.WORSE and found.ratio.ratio < 1 - threshold

    def row(runs: int, noise: str) -> Sequence[str]:
        random = np.random.default_rng([asked.seed, runs, len(noise)])
        draw, spread = noises[noise]
        shape = asked.runs, 2, comparisons, runs, samples
        logs = draw(random, shape)
        if spread:
            logs = logs + random.normal(0, spread, (*shape[:-1], 1))
        counts = np.zeros(2 + len(changes))
        for new, old in np.exp(logs):
            rows = [compare_runs(a, b, rows=comparisons) for a, b in zip(new, old, strict=True)]
            slower = (compare_runs(new[0] * (1 + one), old[0], rows=comparisons) for one in changes)
            counts += [
                any(one.finding is not Finding.NONE for one in rows),
                any(map(is_regression, rows)),
                *map(is_regression, slower),
            ]
        return [str(runs), noise, *(f"{100 * one / asked.runs:.1f}%" for one in counts)]

    found_at = (f"found at {100 * one:.0f}%" for one in changes)
    head = ["runs a side", "noise", "difference shown", "regression", *found_at]
    print_table(head, (row(runs, noise) for runs in (1, 2, 3, 4, 6) for noise in noises))


def changes(asked: argparse.Namespace) -> None:
    """In series without a change, and after the first 5 of 60 saves."""
    noises = {
        "normal, 5%": normal(0.05),
        "normal, 20%": normal(0.2),
        "heavy tails: Student's t, 2 degrees of freedom, times 5%": student(2, 0.05),
        "two-valued: three of ten saves take twice as long": (
            lambda random, n: random.normal(0, 0.01, n) - math.log(2) * (random.random(n) < 0.3)
        ),
        "correlation of 0.5 with the save before, 10%": correlated(0.5, 0.1),
        "correlation of 0.8 with the save before, 20%": correlated(0.8, 0.2),
    }
    before, saves = 5, 60

    def without(draw: _Draw, random: np.random.Generator, count: int) -> str:
        series = (np.exp(draw(random, (count,))).tolist() for _ in range(asked.runs))
        return f"{sum(find_change(one) is not None for one in series) / asked.runs:.1%}"

    def with_one(draw: _Draw, random: np.random.Generator, drop: float) -> str:
        found = held = 0
        for _ in range(asked.runs):
            logs = draw(random, (saves,))
            logs[:before] += math.log(drop)
            change = find_change(np.exp(logs).tolist())
            found += change is not None
            held += change is not None and change.low <= before <= change.high
        return f"{found / asked.runs:.1%}, {held / max(found, 1):.0%}"

    for cell, unit, columns in (
        (without, "{} saves", (8, 12, 40, 120)),
        (with_one, "{}x faster", (1.2, 1.5, 4)),
    ):
        generators = {name: np.random.default_rng(asked.seed) for name in noises}
        print_table(
            ["noise of a save", *map(unit.format, columns)],
            (
                [name, *(cell(draw, generators[name], one) for one in columns)]
                for name, draw in noises.items()
            ),
        )
        print()


def autotune(asked: argparse.Namespace) -> None:
    """On storage of each kind, with each noise."""
    from support.simulated_storage import worlds
    from support.tuning_worlds import GENERATORS

    noises, count = [int(one) for one in asked.noise.split(",")], asked.runs
    seeds, total = range(asked.seed, asked.seed + count), np.zeros((len(noises), 3), int)

    def cells(sums: NDArray[np.int_]) -> Iterator[str]:
        for decided, claimed, wrong in sums:
            yield from (str(decided), f"{claimed} + {wrong}")

    def rows() -> Iterator[Sequence[str]]:
        for name in [*worlds(), _HILLS, *GENERATORS]:
            sums = [
                sum(pool.map(_tuned, [name] * count, seeds, [noise / 100] * count))
                for noise in noises
            ]
            total[:] += sums
            yield [name, *cells(np.array(sums))]
        yield ["all", *cells(total)]

    with ProcessPoolExecutor(asked.jobs) as pool:
        heads = [head for one in noises for head in (f"{one}%: decided", "wrong")]
        print_table(["storage", *heads], rows())


def _tuned(name: str, seed: int, noise: float) -> NDArray[np.int_]:
    """Return 0 or 1 each: one tuning decided; decided wrongly; chose wrongly without a decision."""
    from support.simulated_storage import World, hills, space_of_writers, worlds
    from support.tuning_worlds import GENERATORS

    made: dict[str, Callable[[int, float], World]] = {_HILLS: hills, **GENERATORS}
    world = made[name](seed, noise) if name in made else worlds(noise)[name]
    storage = world.storage(seed)
    outcome = storage.tuner(space_of_writers()).run()
    wrong = world.part_of_best(outcome, storage) < 0.95
    if wrong and outcome.decided:
        print(f"{name}, seed {seed}, noise {noise}: {outcome.chosen.label}", file=sys.stderr)
    return np.array([outcome.decided, wrong and outcome.decided, wrong and not outcome.decided])


_TABLES = {
    "intervals": (intervals, 4000, 20261122),
    "compare": (compare, 2000, 20261124),
    "changes": (changes, 1000, 20261128),
    "autotune": (autotune, 100, 1_100_000),
}
"""Each with its default `--runs` and `--seed`."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=_TABLES)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--noise", default="2,5,10", help="of autotune: percent, of one sample")
    parser.add_argument("--jobs", type=int, default=1, help="of autotune: processes")
    asked = parser.parse_args()
    table, runs, seed = _TABLES[asked.table]
    asked.runs, asked.seed = asked.runs or runs, seed if asked.seed is None else asked.seed
    table(asked)
    print(f"\nstandard error of 5% and of 95%: {math.sqrt(0.05 * 0.95 / asked.runs):.2%}")


if __name__ == "__main__":
    main()
