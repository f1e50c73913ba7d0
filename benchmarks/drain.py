"""The drain at full speed next to the `s3` writer alone, and training steps during a paced one.

    python benchmarks/drain.py --target DIRECTORY [--size 512MiB] [--rounds 5] [--record FILE]

- s3: the `s3` writer uploads the two files of a checkpoint from memory to a real server (rclone)
- drain: the drain uploads the same checkpoint from local storage, by the same writer; the time is
  that of its journal, from the begin of the copy to the manifest
- steps: a training step (products of matrices by one thread, then idle as with a GPU), in blocks
  without a drain and with one that copies to a directory at 20 MiB/s, which take turns
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from iobench import Checkpointer, Remote
from iobench.bench.targets.scratch import scratch_directory
from iobench.remote.journal import DrainJournal
from iobench.testing import LocalS3, local_s3
from iobench.units import MIB, parse_size
from iobench.writers.image import FileImage
from iobench.writers.registry import make

_LEAST, _MOST = 0.9, 0.01
_STEPS, _IDLE_S, _PACE = 40, 0.03, "20MiB"


def states(size: int) -> Any:
    """Random bytes that differ from save to save."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    while True:
        data[:4096].random_(0, 256)
        yield {"w": data}


class Uploads:
    """The two arms; each returns its seconds."""

    def __init__(self, server: LocalS3, directory: Path, size: int) -> None:
        self._server, self._directory = server, directory
        self._states, self._size, self._step = states(size), size, 0
        self._data = np.random.default_rng(0).integers(0, 256, size, np.uint8)

    def s3(self) -> float:
        self._step += 1
        writer = make("s3")
        images = [FileImage.of("tensors", [self._data]), FileImage.of("skeleton", [b"{}" * 50])]
        began_s = time.perf_counter()
        writer.write_many(images, f"{self._server.target}/plain-{self._step}")
        return time.perf_counter() - began_s

    def drain(self) -> float:
        self._step += 1
        remote = f"{self._server.target}/drain-{self._step}"
        directory = self._directory / f"run-{self._step}"
        with Checkpointer(directory, tiers=[Remote(remote)]) as ckpt:
            ckpt.save(next(self._states), 1)
            ckpt.wait(until="remote")
        (copy,) = [one for one in DrainJournal(directory).events() if one.event == "durable"]
        return copy.elapsed_s


def speed(server: LocalS3, directory: Path, size: int, rounds: int, out: record.Record) -> None:
    uploads = Uploads(server, directory, size)
    arms: dict[str, Callable[[], float]] = {"s3": uploads.s3, "drain": uploads.drain}
    for arm in arms.values():  # connections and pages are there afterwards
        arm()
    order, seconds = random.Random(0), {name: list[float]() for name in arms}
    for turn in range(rounds):
        for name in order.sample(list(arms), len(arms)):
            seconds[name].append(arms[name]())
            out.sample(name, turn, seconds[name][-1], bytes=size)
    for name, times in seconds.items():
        each = " ".join(f"{size / one / MIB:.0f}" for one in times)
        print(f"{name:6} {size / statistics.median(times) / MIB:6.0f} MiB/s   ({each})")
    pairs = [a / b for a, b in zip(seconds["s3"], seconds["drain"], strict=True)]
    ratio = statistics.median(pairs)
    shown = " ".join(f"{one:.2f}" for one in sorted(pairs))
    verdict = "ok  " if ratio >= _LEAST else "MISS"
    print(f"{verdict} {ratio:.2f} (>= {_LEAST})  rate of the drain / s3   by round: {shown}")


class Steps:
    """Training steps, with and without a drain in the background."""

    def __init__(self, directory: Path, size: int) -> None:
        self._directory, self._states = directory, states(size)
        self._matrix, self._blocks = torch.randn(500, 500), 0
        torch.set_num_threads(1)

    def block(self) -> float:
        """The median step of a block, in seconds."""
        taken = []
        for _ in range(_STEPS):
            began_s = time.perf_counter()
            for _ in range(4):
                torch.nn.functional.normalize(self._matrix @ self._matrix)
            time.sleep(_IDLE_S)
            taken.append(time.perf_counter() - began_s)
        return statistics.median(taken)

    def draining(self) -> float:
        """The same, while a checkpoint is copied all the time."""
        self._blocks += 1
        local = self._directory / f"steps-{self._blocks}"
        remote = Remote(local.with_suffix(".remote"), bandwidth_limit=_PACE)
        ckpt = Checkpointer(local, tiers=[remote])
        ckpt.save(next(self._states), 1)
        found = self.block()
        assert ckpt._tier.drain.queue.pending(), (
            "the copy ended before the block: use a larger size"
        )
        ckpt._tier.drain.stop()
        ckpt._tier.drain.queue.forget(1)
        ckpt.close()
        return found


def steps(directory: Path, size: int, rounds: int, out: record.Record) -> None:
    runs = Steps(directory, size)
    runs.block()
    plain, drained = [], []
    for turn in range(rounds):
        pair = [(plain, runs.block, "step"), (drained, runs.draining, "step, draining")]
        for found, run, name in pair[:: 1 if turn % 2 else -1]:
            found.append(run())
            out.sample(name, turn, found[-1])
    slower = [b / a - 1 for a, b in zip(plain, drained, strict=True)]
    found = statistics.median(slower)
    shown = " ".join(f"{one:+.2%}" for one in sorted(slower))
    verdict = "ok  " if found <= _MOST else "MISS"
    print(f"step   {1000 * statistics.median(plain):.2f} ms without a drain")
    print(f"{verdict} {found:+.2%} (<= {_MOST:.0%})  slower steps at {_PACE}/s   by round: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", default="512MiB")
    parser.add_argument("--rounds", type=int, default=5)
    record.add_option(parser)
    arguments = parser.parse_args()
    size = parse_size(arguments.size)
    with (
        record.Record(arguments.record, target=arguments.target) as samples,
        scratch_directory(arguments.target) as scratch,
    ):
        with local_s3() as server, server.active():
            speed(server, Path(scratch), size, arguments.rounds, samples)
        steps(Path(scratch), size // 4, 3 * arguments.rounds, samples)


if __name__ == "__main__":
    main()
