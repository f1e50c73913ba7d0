"""How often a tuning names a wrong winner, on storages that exist on paper: a Markdown table.

    PYTHONPATH=tests python benchmarks/autotune_errors.py [--runs 200]

The true rates are known there. A winner is wrong whose true rate is more than 5 % below the best of
the whole space, and a claim is wrong that a setting is better than the baseline though it is not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from support.simulated_storage import (
    NOISES,
    SimulatedStorage,
    best_rate,
    space_of_writers,
    true_rate,
)

from iobench.bench.judging.comparison import Finding
from iobench.tune.candidate import Candidate
from iobench.units import GIB


def degrading(candidate: Candidate, number: int) -> float:
    """uring's settings lose half of their rate from their fourth trial on."""
    slower = 0.5 if candidate.writer == "uring" and number > 3 else 1.0
    return slower * true_rate(candidate)


def flat(candidate: Candidate, number: int) -> float:  # noqa: ARG001
    """Every setting is as fast as every other."""
    return 2.0 * GIB


def run(runs: int, settled: Callable[[Candidate], float], world: Mapping[str, Any]) -> list[Any]:
    """Part of the best true rate, whether it claimed to beat the baseline, seconds and GiB."""
    space = space_of_writers()
    found = []
    for seed in range(runs):
        storage = SimulatedStorage(seed=seed, **world)
        outcome = storage.tuner(space).run()
        best = max(
            settled(one)
            for name in space.dimensions
            for one in [*space.known, *(t.candidate for t in outcome.trials.values())]
            if one.writer == name
        )
        if settled is true_rate:
            best = best_rate(space)
        over = outcome.verdict.over_baseline
        claimed = over is not None and over.finding is Finding.BETTER
        found.append(
            (
                settled(outcome.chosen) / best,
                claimed,
                outcome.budget.spent_s,
                outcome.budget.written_bytes / GIB,
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    runs = parser.parse_args().runs
    print("| noise of a sample | below 95 % of the best | below 90 % | median | worst | claims |")
    print("|---|---|---|---|---|---|")
    worlds: dict[str, tuple[Callable[[Candidate], float], Mapping[str, Any]]] = {
        name: (true_rate, settings) for name, settings in NOISES.items()
    }
    worlds["5 %, uring at half its rate after three trials"] = (
        lambda one: degrading(one, 99),
        {"rate": degrading},
    )
    worlds["10 %, all settings equal"] = (
        lambda one: flat(one, 0),
        {"rate": flat, "noise": lambda rng: rng.gauss(0, 0.10)},
    )
    for name, (settled, world) in worlds.items():
        found = run(runs, settled, world)
        parts = sorted(part for part, *_ in found)
        print(
            f"| {name} | {sum(p < 0.95 for p in parts)} of {runs} | "
            f"{sum(p < 0.9 for p in parts)} | {parts[runs // 2]:.3f} | {parts[0]:.3f} | "
            f"{sum(claimed for _, claimed, *_ in found)} of {runs} better than the baseline |",
            flush=True,
        )


if __name__ == "__main__":
    main()
