"""Does `iobench autotune` find what an exhaustive grid finds?

    python benchmarks/autotune_grid.py grid  --target DIRECTORY -o grid.jsonl      # about 5 minutes
    python benchmarks/autotune_grid.py tune  --target DIRECTORY -o tuned --seed 1  # 3 minutes each
    python benchmarks/autotune_grid.py judge --target DIRECTORY --grid grid.jsonl tuned-*.toml

`grid` saves a checkpoint of `--size` by every setting of a grid, `--rounds` times, in random order
and back, then the best eight `--finals` times more. `tune` is `iobench autotune` with its default
budget. `judge` saves by the grid's best three and by each tuned writer, interleaved, with fresh
samples, and prints how each compares with the best of the grid. All in one process, synced, the
machine otherwise idle.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from iobench import load_writer
from iobench.bench.judging.stats import median, paired_log_ratio
from iobench.tune.candidate import Candidate
from iobench.tune.journal import Journal, TrialRecord, read_journal
from iobench.tune.measurement import Measurement, Step
from iobench.tune.tuning import Tuning, TuningRequest
from iobench.units import GIB, KIB, MIB, format_size, parse_size

BEST = 8
HOURS = 3600.0


def settings() -> Iterator[Candidate]:
    """The grid: every writer's block sizes and depths, the rest at and off the defaults."""
    for name in ("buffered", "aiofiles"):
        yield Candidate.of(name, {}, "drawn")
    for block, threads in itertools.product((1, 4, 16, 64), (1, 2, 4)):
        yield Candidate.of("uncached", {"block_size": block * MIB, "threads": threads}, "drawn")
    for block, threads in itertools.product((1, 4, 8, 16, 32, 64), (1, 2, 4, 8)):
        yield Candidate.of("odirect", {"block_size": block * MIB, "threads": threads}, "drawn")
    for block, depth in itertools.product((512, 1024, 4096, 16384), (4, 8, 16, 32)):
        yield Candidate.of("uring", {"block_size": block * KIB, "iodepth": depth}, "drawn")
    for block, depth in itertools.product((1, 4, 8, 16, 32), (1, 2, 4, 8)):
        yield Candidate.of("hybrid", {"block_size": block * MIB, "iodepth": depth}, "drawn")
    others: list[tuple[str, Mapping[str, Any]]] = [
        ("odirect", {"block_size": 8 * MIB, "threads": 4, "fallocate": False}),
        ("odirect", {"block_size": 32 * MIB, "threads": 8, "fallocate": False}),
        ("uring", {"rings": 2}),
        ("uring", {"rings": 2, "block_size": 4 * MIB, "iodepth": 8}),
        ("uring", {"fallocate": False}),
        ("hybrid", {"fallocate": False}),
        ("hybrid", {"uring": False}),
        ("hybrid", {"uring": False, "block_size": 32 * MIB, "iodepth": 8}),
    ]
    for name, values in others:
        yield Candidate.of(name, values, "drawn")


def tuning(arguments: argparse.Namespace) -> Tuning:
    asked = TuningRequest(
        workload=arguments.workload,
        target=str(arguments.target),
        size_bytes=parse_size(arguments.size),
        max_s=HOURS,
        max_bytes=1000 * GIB,
        seed=arguments.seed,
    )
    return Tuning.of(asked)


def there_and_back(
    names: Sequence[str], rounds: int, rng: random.Random
) -> Iterator[tuple[int, list[str]]]:
    """Each round's order: random, then backwards."""
    order = list(names)
    for number in range(rounds):
        if number % 2 == 0:
            rng.shuffle(order)
        else:
            order.reverse()
        yield number, list(order)


def rate(measured: Measurement) -> float:
    assert measured.save is not None, measured.error
    return measured.save.bytes / measured.save.elapsed_s


def grid(arguments: argparse.Namespace) -> None:
    made = tuning(arguments)
    chosen = {one.label: one for one in settings()}
    rng = random.Random(arguments.seed)
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    size = made.largest_bytes
    with (
        Journal.create(Path(arguments.output), made.header()) as journal,
        made.runner(time.perf_counter()) as measure,
    ):

        def run(names: Sequence[str], rounds: int, first: int) -> None:
            for number, order in there_and_back(names, rounds, rng):
                for name in order:
                    step = Step(phase="race", round=first + number, size_bytes=size)
                    measured = measure(chosen[name], step)
                    journal.write(TrialRecord.of(chosen[name], step, measured))
                    rates[name].append(rate(measured))
                print(f"round {first + number} done", file=sys.stderr, flush=True)

        run(list(chosen), arguments.rounds, 1)
        best = sorted(chosen, key=lambda name: -median(rates[name]))[:BEST]
        run(best, arguments.finals, arguments.rounds + 1)
    report(rates)


def report(rates: Mapping[str, Sequence[float]]) -> None:
    print("| setting | samples | GiB/s | slowest - fastest |\n|---|---|---|---|")
    for name in sorted(rates, key=lambda one: -median(rates[one]))[:15]:
        own = [one / GIB for one in rates[name]]
        print(f"| {name} | {len(own)} | {median(own):.2f} | {min(own):.2f} - {max(own):.2f} |")


def tune(arguments: argparse.Namespace) -> None:
    base = f"{arguments.output}-{arguments.seed}"
    began = time.perf_counter()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "iobench", "autotune", "-w", arguments.workload),
            *("--target", arguments.target, "--seed", str(arguments.seed)),
            *("-o", f"{base}.toml", "--journal", f"{base}.jsonl"),
        ],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    print(done.stdout)
    print(f"{time.perf_counter() - began:.1f} s from start to end")


def judge(arguments: argparse.Namespace) -> None:
    made = tuning(arguments)
    rates: dict[str, list[float]] = {}
    options: dict[str, Candidate] = {}
    for record in read_journal(Path(arguments.grid))[1]:
        one = Candidate.of(record.writer, record.options, "drawn")
        options[one.label] = one
        rates.setdefault(one.label, []).append(rate(record.measured))
    finals = max(map(len, rates.values()))
    best = sorted(
        (name for name in rates if len(rates[name]) == finals),
        key=lambda name: -median(rates[name]),
    )[:3]
    tuned = {}
    for path in arguments.tuned:
        writer = load_writer(path)
        one = Candidate(writer=writer.name, options=writer.options, origin="drawn")
        tuned[path], options[one.label] = one.label, one
    contenders = list(dict.fromkeys([*best, *tuned.values()]))
    fresh: dict[str, list[float]] = {name: [] for name in contenders}
    rng = random.Random(arguments.seed)
    with made.runner(time.perf_counter()) as measure:
        for number, order in there_and_back(contenders, arguments.rounds, rng):
            for name in order:
                step = Step(phase="confirm", round=number, size_bytes=made.largest_bytes)
                fresh[name].append(rate(measure(options[name], step)))
    report(fresh)
    first = max(best, key=lambda name: median(fresh[name]))
    print(f"\nbest of the grid with fresh samples: {first}, {format_size(made.largest_bytes)}\n")
    print("| tuned | setting | of the grid's best | 95% interval |\n|---|---|---|---|")
    for path, name in tuned.items():
        ratio = paired_log_ratio(fresh[name], fresh[first])
        span = ratio.interval
        shown = f"{span.low:.3f} - {span.high:.3f}" if span and name != first else "-"
        print(f"| {Path(path).name} | {name} | {ratio.ratio:.3f} | {shown} |")
    worst = min(paired_log_ratio(fresh[name], fresh[first]).ratio for name in tuned.values())
    print(f"\nworst: {100 * (1 - worst):.1f}% below" if worst < 1 else "\nnone below")
    assert math.isfinite(worst)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("grid", "tune", "judge"))
    parser.add_argument("tuned", nargs="*", help="writer files, for judge")
    parser.add_argument("--target", required=True)
    parser.add_argument("--workload", default="llama7b")
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--finals", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grid", help="what grid wrote, for judge")
    parser.add_argument("-o", "--output", default="grid.jsonl")
    arguments = parser.parse_intermixed_args()
    {"grid": grid, "tune": tune, "judge": judge}[arguments.what](arguments)


if __name__ == "__main__":
    main()
