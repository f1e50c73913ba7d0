"""How often a tuning names a wrong winner, on simulated storage: the table of docs/autotune.md.

    PYTHONPATH=tests python benchmarks/autotune_errors.py [--runs 100] [--first-seed 100000]

The true rates are known there. A winner is wrong whose settled rate is more than 5% below the best
of the whole space: that of large checkpoints once everything that can wear out is worn out. A cell
has the tunings that decided, and how many winners were wrong: with a decision + without one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from support.simulated_storage import World, hills, space_of_writers, worlds

_WRONG = 0.95  # of the best rate


def errors(world_of: Callable[[int], World], seeds: range) -> tuple[int, int, int]:
    """Return how many tunings decided, how many of them wrongly, and other wrong winners."""
    space = space_of_writers()
    decided = claimed = wrong = 0
    for seed in seeds:
        world = world_of(seed)
        outcome = world.storage(seed).tuner(space).run()
        bad = world.settled(outcome.chosen) < _WRONG * world.best(space)
        decided += outcome.decided
        claimed += bad and outcome.decided
        wrong += bad and not outcome.decided
    return decided, claimed, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=100_000)
    parser.add_argument("--noise", default="2,5,10", help="percent, of one sample")
    args = parser.parse_args()
    noises = [int(one) for one in args.noise.split(",")]
    seeds = range(args.first_seed, args.first_seed + args.runs)
    heads = " | ".join(f"{one}%: decided | wrong" for one in noises)
    print(f"| storage | {heads} |")
    print("|---" * (1 + 2 * len(noises)) + "|")
    total = [[0, 0, 0] for _ in noises]
    for name in [*worlds(), "another hill for each seed"]:
        cells = []
        for column, noise in enumerate(noises):
            share = noise / 100
            world = worlds(share).get(name)
            found = errors(
                lambda seed, world=world, share=share: world or hills(seed, share), seeds
            )
            total[column] = [a + b for a, b in zip(total[column], found, strict=True)]
            cells += _cells(*found)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"| all | {' | '.join(cell for one in total for cell in _cells(*one))} |")


def _cells(decided: int, claimed: int, wrong: int) -> list[str]:
    return [str(decided), f"{claimed} + {wrong}"]


if __name__ == "__main__":
    main()
