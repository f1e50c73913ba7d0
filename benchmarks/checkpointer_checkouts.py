"""Checkpointers of two checkouts, side by side, without options: is one of them slower?

    git worktree add ../before COMMIT
    python benchmarks/checkpointer_checkouts.py ../before . --target DIRECTORY [--size 64MiB]
        [--tensors 100,10000] [--rounds 12] [--record FILE]

Both run in this interpreter's environment, each in a process of its own that stays for the whole
run. In every round each arm is measured once in each checkout, in random order. Arms: `save`,
`save_async` with the `wait` that follows, the stall of `save_async`, and `load`, of states of these
numbers of tensors; seconds by the clock, and CPU seconds of the process. A directory on tmpfs
leaves out the noise of a disk.

The ratio is that of the rates, second checkout over first: above 1 the second is faster. "No
difference shown" means that the 95% interval of the paired ratio contains 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import paired
import record

from iobench.bench.judging.stats import median
from iobench.bench.targets.scratch import scratch_directory
from iobench.units import parse_size

_CHILD = """
import json, sys, time
import torch
from iobench import Checkpointer, KeepLast

directory, size = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
runs = {}


def run(tensors):
    if tensors not in runs:
        one = size // tensors // 4
        state = {"model": {f"layers.{n}.weight": torch.randn(one) for n in range(tensors)}}
        runs[tensors] = [Checkpointer(f"{directory}/{tensors}", keep=KeepLast(1)), state, 0]
    return runs[tensors]


for line in sys.stdin:
    order = json.loads(line)
    found = run(order["tensors"])
    ckpt, state = found[:2]
    found[2] += 1
    answer, loaded = {}, None
    began_s, cpu_s = time.perf_counter(), time.process_time()
    if order["do"] == "load":
        loaded = ckpt.load()
    elif order["do"] == "save":
        ckpt.save(state, found[2])
    else:
        ckpt.save_async(state, found[2])
        answer["stall"] = time.perf_counter() - began_s
        ckpt.wait()
    answer[order["do"]] = time.perf_counter() - began_s
    answer["CPU of " + order["do"]] = time.process_time() - cpu_s
    del loaded
    print(json.dumps(answer), flush=True)
for ckpt, *_ in runs.values():
    ckpt.close()
"""

_OPERATIONS = ("save", "save_async", "load")


class Checkout:
    """One checkout and the process that measures it."""

    def __init__(self, path: Path, directory: Path, size_bytes: int) -> None:
        # PYTHONPATH comes before the editable install, and the current directory is never on it.
        env = {**os.environ, "PYTHONPATH": str(path.resolve()), "PYTHONSAFEPATH": "1"}
        directory.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(directory), str(size_bytes)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )

    def ask(self, operation: str, tensors: int) -> dict[str, float]:
        """Do one operation; return seconds by the name of what they are of."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": operation, "tensors": tensors}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return {f"{name}, {tensors} tensors": value for name, value in answer.items()}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(
    both: list[Checkout], counts: list[int], rounds: int, samples: record.Record
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each arm in each round, of the first and of the second checkout."""
    seconds: dict[str, tuple[list[float], list[float]]] = {}
    work = [(operation, tensors) for tensors in counts for operation in _OPERATIONS]
    for number in range(-1, rounds):  # the first round warms up and is not counted
        order = work if number < 0 else random.sample(work, len(work))  # a save before a load
        for operation, tensors in order:
            for side in random.sample((0, 1), 2):
                for name, value in both[side].ask(operation, tensors).items():
                    if number >= 0:
                        seconds.setdefault(name, ([], []))[side].append(value)
                        samples.sample(f"{name}, {('first', 'second')[side]}", number, value)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return seconds


def report(seconds: dict[str, tuple[list[float], list[float]]]) -> None:
    print(paired.HEADING)
    for name, (first, second) in sorted(seconds.items()):
        shown = [f"{1000 * median(one):.1f} ms" for one in (first, second)]
        print(paired.row(name, (first, second), shown))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", type=parse_size, default=64 << 20)
    parser.add_argument("--tensors", default="100,10000")
    parser.add_argument("--rounds", type=int, default=12)
    record.add_option(parser)
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        samples = stack.enter_context(record.Record(given.record, target=given.target))
        scratch = stack.enter_context(scratch_directory(given.target))
        both = []
        for number, path in enumerate((given.first, given.second)):
            both.append(Checkout(path, scratch / str(number), given.size))
            stack.callback(both[-1].close)
        counts = [int(count) for count in given.tensors.split(",")]
        report(measure(both, counts, given.rounds, samples))


if __name__ == "__main__":
    main()
