"""How often a tuning decides wrongly, on simulated storage: the table of docs/autotune.md.

    PYTHONPATH=tests python benchmarks/autotune_errors.py [--runs 100] [--first-seed 1100000]

The true rates are known there. A winner is wrong whose rate is more than 5% below the best of the
whole space, at the confirmed size and at the end of the tuning. A cell has the tunings that
decided, and how many winners were wrong: with a decision + without one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from support.simulated_storage import World, hills, space_of_writers, worlds
from support.tuning_worlds import GENERATORS

_WRONG = 0.95  # of the best rate


def tuned(name: str, seed: int, noise: float) -> tuple[bool, bool]:
    """Return whether one tuning decided, and whether its choice is wrong."""
    world = world_of(name, seed, noise)
    storage = world.storage(seed)
    outcome = storage.tuner(space_of_writers()).run()
    wrong = world.part_of_best(outcome, storage) < _WRONG
    if wrong and outcome.decided:
        print(f"{name}, seed {seed}, noise {noise}: {outcome.chosen.label}", file=sys.stderr)
    return outcome.decided, wrong


def world_of(name: str, seed: int, noise: float) -> World:
    """Return one storage of a kind."""
    made: dict[str, Callable[[int, float], World]] = {"another hill for each seed": hills}
    made |= GENERATORS
    return made[name](seed, noise) if name in made else worlds(noise)[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=1_100_000)
    parser.add_argument("--noise", default="2,5,10", help="percent, of one sample")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    noises = [int(one) for one in args.noise.split(",")]
    seeds = range(args.first_seed, args.first_seed + args.runs)
    heads = " | ".join(f"{one}%: decided | wrong" for one in noises)
    print(f"| storage | {heads} |")
    print("|---" * (1 + 2 * len(noises)) + "|")
    total = [[0, 0, 0] for _ in noises]
    with ProcessPoolExecutor(args.jobs) as pool:
        for name in [*worlds(), "another hill for each seed", *GENERATORS]:
            cells = []
            for column, noise in enumerate(noises):
                count = len(seeds)
                found = list(pool.map(tuned, [name] * count, seeds, [noise / 100] * count))
                sums = [
                    sum(decided for decided, _ in found),
                    sum(decided and wrong for decided, wrong in found),
                    sum(wrong and not decided for decided, wrong in found),
                ]
                total[column] = [a + b for a, b in zip(total[column], sums, strict=True)]
                cells += _cells(*sums)
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"| all | {' | '.join(cell for one in total for cell in _cells(*one))} |")


def _cells(decided: int, claimed: int, wrong: int) -> list[str]:
    return [str(decided), f"{claimed} + {wrong}"]


if __name__ == "__main__":
    main()
