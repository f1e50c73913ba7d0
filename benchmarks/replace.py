"""What it costs to save over the file before, and to remove one: at once, and freed later.

    python benchmarks/replace.py --target DIRECTORY [--size 1GiB] [--rounds 7] [--writer hybrid]

Arms, interleaved in random order: a save to a new name; a save over a file of the same size, as it
is and with `freed_later` switched off; removing a file by `os.unlink` and by `remove_tree`. What is
freed later is waited for before the next arm begins. Decision 35 has the reading.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from iobench.bench.targets.scratch import scratch_directory
from iobench.bench.targets.settle import settle
from iobench.environment import DeviceMonitor
from iobench.units import GIB, format_seconds, parse_size
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.local import deferred_free
from iobench.writers.registry import make


class Arms:
    """Each returns seconds, and leaves the directory empty."""

    def __init__(self, directory: Path, writer: Writer, size_bytes: int) -> None:
        self.directory, self.writer = directory, writer
        data = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
        self.image = FileImage.of("file", [data])
        self.monitor = DeviceMonitor(directory)

    def save_new(self) -> float:
        return self._ended(self._save())

    def save_over(self) -> float:
        self._save()
        return self._ended(self._save())

    def save_over_at_once(self) -> float:
        with mock.patch.object(deferred_free, "_LARGE", 1 << 60):
            return self.save_over()

    def unlink(self) -> float:
        self._save()
        began = time.perf_counter()
        os.unlink(self.directory / "file")
        return time.perf_counter() - began

    def remove(self) -> float:
        self._save(self.directory / "tree")
        began = time.perf_counter()
        deferred_free.remove_tree(self.directory / "tree")
        return time.perf_counter() - began

    def _save(self, directory: Path | None = None) -> float:
        settle(self.directory, self.monitor)
        began = time.perf_counter()
        self.writer.write(self.image, directory or self.directory)
        return time.perf_counter() - began

    def _ended(self, elapsed_s: float) -> float:
        (self.directory / "file").unlink()
        return elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--writer", default="hybrid")
    arguments = parser.parse_args()
    size_bytes = parse_size(arguments.size)
    with scratch_directory(arguments.target) as scratch:
        arms = Arms(scratch, make(arguments.writer), size_bytes)
        work: dict[str, Callable[[], float]] = {
            "save to a new name": arms.save_new,
            "save over a file": arms.save_over,
            "the same, freed at once": arms.save_over_at_once,
            "os.unlink": arms.unlink,
            "remove_tree": arms.remove,
        }
        order = random.Random(0)
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for turn in range(arguments.rounds):
            for name in order.sample(list(work), len(work)):
                seconds[name].append(work[name]())
                deferred_free.wait()
            print(f"round {turn + 1} of {arguments.rounds} done", flush=True)
    print(f"\n{size_bytes / GIB:.2f} GiB by {arguments.writer}")
    for name, times in seconds.items():
        each = " ".join(f"{one:.3f}" for one in sorted(times))
        print(f"{name:24} {format_seconds(statistics.median(times)):>8}   s: {each}")


if __name__ == "__main__":
    main()
