"""How often a tuning names a wrong winner, on simulated storage: a Markdown table.

    PYTHONPATH=tests python benchmarks/autotune_errors.py [--runs 200]

The true rates are known there. A winner is wrong whose settled rate is more than 5% below the best
of the whole space: that of large checkpoints once everything that can wear out is worn out. It is
confidently wrong where the tuning does not say that it is not decided.
"""

from __future__ import annotations

import argparse

from support.simulated_storage import WORLDS, World, space_of_writers

from iobench.bench.judging.comparison import Finding
from iobench.units import GIB


def flat(one: object, size: int, usage: object) -> float:  # noqa: ARG001
    """Every setting is as fast as every other."""
    return 2.0 * GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    runs = parser.parse_args().runs
    print("| storage | wrong | wrong and decided | decided | median | worst | beats the baseline |")
    print("|---|---|---|---|---|---|---|")
    equal = World(rate=flat, noise=lambda rng: rng.gauss(0, 0.10))
    space = space_of_writers()
    for name, world in {**WORLDS, "all settings equal, 10%": equal}.items():
        best, parts, decided, wrong, claims = world.best(space), [], 0, 0, 0
        for seed in range(runs):
            outcome = world.storage(seed).tuner(space).run()
            parts.append(world.settled(outcome.chosen) / best)
            decided += outcome.decided
            wrong += outcome.decided and parts[-1] < 0.95
            over = outcome.verdict.over_baseline
            claims += over is not None and over.finding is Finding.BETTER
        parts.sort()
        print(
            f"| {name} | {sum(part < 0.95 for part in parts)} of {runs} | {wrong} | {decided} | "
            f"{parts[runs // 2]:.3f} | {parts[0]:.3f} | {claims} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
