"""Two checkouts of iobench, side by side: is one of them slower?

    git worktree add ../before COMMIT
    python benchmarks/two_checkouts.py ../before . --target DIRECTORY [--size 1GiB] [--rounds 12]

Both run in this interpreter's environment, each in a process of its own that stays for the whole
run. In every round each arm is measured once in each checkout, in random order, so that drift of
the disk meets both. Arms: a durable save and a cold restore of one file by every writer (`s3` on a
local server, `gds` where it is available), the import of iobench, and `iobench --help`. Memory
begins 64 bytes after a page, as tensors do: direct writers have to stage it.

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
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import paired

from iobench.bench.judging.stats import median
from iobench.bench.targets.local_s3 import local_s3
from iobench.bench.targets.scratch import scratch_directory
from iobench.units import MIB, parse_size

_CHILD = """
import importlib, json, os, sys, time
import numpy as np
from iobench.writers.image import FileImage

size = int(sys.argv[1])
rng = np.random.default_rng(1)
memory = np.empty(size + 4096, dtype=np.uint8)
begin = -memory.ctypes.data % 4096 + 64
data = memory[begin : begin + size]
for at in range(0, size, 1 << 26):
    part = data[at : at + (1 << 26)]
    part[:] = rng.integers(0, 256, len(part), dtype=np.uint8)
image, writers = FileImage.of("file", [data]), {}


def writer(place):
    if place not in writers:
        module, name = place.split(":")
        writers[place] = getattr(importlib.import_module(module), name)()
    return writers[place]


def evict(path):
    if "://" in path:
        return
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


for line in sys.stdin:
    order = json.loads(line)
    try:
        one, target = writer(order["place"]), order["target"]
        if order["operation"] == "available":
            answer = one.available(target).ok
        else:
            move = one.write if order["operation"] == "save" else one.read
            if move == one.read:
                evict(f"{target}/file")
            began = time.perf_counter()
            move(image, target)
            answer = time.perf_counter() - began
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


class Checkout:
    """One checkout and the process that measures it."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        project = tomllib.loads((path / "pyproject.toml").read_text())["project"]
        self.writers: dict[str, str] = project["entry-points"]["iobench.writers"]
        # PYTHONPATH comes before the editable install, and the current directory is never on it.
        self._env = {**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-c", _CHILD, str(size_bytes)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=self._env, stdin=pipe, stdout=pipe, text=True, cwd="/"
        )

    def ask(self, writer: str, operation: str, target: str) -> float | bool:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"place": self.writers[writer], "operation": operation, "target": target}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if isinstance(answer, str):
            raise SystemExit(f"{writer} {operation}: {answer}")
        return answer

    def run(self, *arguments: str) -> float:
        """Seconds of a new interpreter with these arguments."""
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments], env=self._env, check=True, capture_output=True, cwd="/"
        )
        return time.perf_counter() - began

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


_STARTS = {
    "import iobench": ("-c", "import iobench"),
    "iobench --help": ("-m", "iobench", "--help"),
}


@contextlib.contextmanager
def checkouts(paths: list[Path], size_bytes: int) -> Iterator[list[Checkout]]:
    with contextlib.ExitStack() as stack:
        both = []
        for path in paths:
            both.append(Checkout(path.resolve(), size_bytes))
            stack.callback(both[-1].close)
        yield both


def measure(
    both: list[Checkout], targets: dict[str, str], rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each arm in each round, of the first and of the second checkout."""
    seconds: dict[str, tuple[list[float], list[float]]] = {}
    for number in range(-1, rounds):  # the first round warms up and is not counted
        arms = [*targets, *_STARTS]
        random.shuffle(arms)
        for arm in arms:
            for side in random.sample((0, 1), 2):
                if arm in _STARTS:
                    found = {arm: both[side].run(*_STARTS[arm])}
                else:
                    found = {
                        f"{arm} {operation}": both[side].ask(arm, operation, targets[arm])
                        for operation in ("save", "restore")
                    }
                for name, value in found.items():
                    pair = seconds.setdefault(name, ([], []))
                    if number >= 0:
                        pair[side].append(value)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return seconds


def report(seconds: dict[str, tuple[list[float], list[float]]], size_bytes: int) -> None:
    print(paired.HEADING)
    for name, (first, second) in sorted(seconds.items()):
        if name in _STARTS:
            figures = [f"{median(s) * 1000:.0f} ms" for s in (first, second)]
        else:
            figures = [f"{size_bytes / MIB / median(s):.0f} MiB/s" for s in (first, second)]
        print(paired.row(name, (first, second), figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", type=parse_size, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", help="names of writers, separated by commas")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(local_s3())
        stack.enter_context(server.active())  # before the children, which inherit it
        both = stack.enter_context(checkouts([given.first, given.second], given.size))
        local = str(stack.enter_context(scratch_directory(given.target)))
        names = [n for n in both[0].writers if n in both[1].writers]
        if given.only:
            names = [n for n in names if n in given.only.split(",")]
        targets = {n: f"{server.target}/two-checkouts" if n == "s3" else local for n in names}
        targets = {n: t for n, t in targets.items() if all(c.ask(n, "available", t) for c in both)}
        report(measure(both, targets, given.rounds), given.size)


if __name__ == "__main__":
    main()
