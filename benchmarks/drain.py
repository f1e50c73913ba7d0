"""A drain to another directory, next to its writer alone: both make the same new bytes durable.

    python benchmarks/drain.py --local /dev/shm --target /mnt/second [--size 4GiB] [--rounds 8]
        [--writer hybrid] [--record FILE]

- `writer`: a file of `--size` in memory, through the writer
- `drain`: a checkpoint of a tensor of that size, from its begin in the drain to its publication,
  without the read-back after it: the `elapsed_s` of `durable` in the journal

Both arms run in each round, in random order, on an idle device. `--local` is where checkpoints are
saved; on tmpfs it costs no device time, and as much memory again. The machine must be idle.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import numpy as np
import record
import torch

import iobench
from iobench.bench.targets.scratch import scratch_directory
from iobench.bench.targets.settle import settle
from iobench.environment import DeviceMonitor
from iobench.remote.journal import DrainJournal
from iobench.stats.estimates import median, paired_log_ratio
from iobench.units import GIB, format_rate, parse_size
from iobench.writers.image import FileImage


def writes(memory: torch.Tensor, target: Path, writer: iobench.Writer) -> float:
    """Return the seconds that the writer takes."""
    image = FileImage.of("alone", [memory.numpy().view(np.uint8)])
    began_s = time.perf_counter()
    writer.write(image, target)
    return time.perf_counter() - began_s


def drains(memory: torch.Tensor, target: Path, writer: iobench.Writer, local: Path) -> float:
    """Return the seconds that the drain takes for its copy."""
    with scratch_directory(local) as directory:
        remote = iobench.Remote(target / "run", writer=writer)
        with iobench.Checkpointer(directory, tiers=[remote]) as ckpt:
            ckpt.save({"w": memory}, 1)
            ckpt.wait(until="remote")
        (durable,) = [one for one in DrainJournal(directory).events() if one.event == "durable"]
        return durable.elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", type=parse_size, default=4 * GIB)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--writer", type=iobench.load_writer, default="hybrid")
    record.add_option(parser)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {"writer": [], "drain": []}
    monitor = DeviceMonitor(given.target)
    with record.Record(given.record, target=given.target) as kept:
        for turn in range(given.rounds):
            memory = torch.from_numpy(np.random.default_rng(turn).random(given.size // 8))
            for arm in random.sample(list(seconds), 2):
                with scratch_directory(given.target) as target:
                    settle(target, monitor)
                    more = (given.local,) if arm == "drain" else ()
                    taken_s = {"writer": writes, "drain": drains}[arm](
                        memory, target, given.writer, *more
                    )
                seconds[arm].append(taken_s)
                kept.sample(arm, turn, taken_s, bytes=given.size)
    for arm, found in seconds.items():
        print(f"{arm:8}{format_rate(given.size / median(found))}")
    ratio = paired_log_ratio(seconds["writer"], seconds["drain"])
    held = ratio.interval
    within = f", 95% interval {held.low:.3f} to {held.high:.3f}" if held else ""
    print(f"the drain reaches {ratio.ratio:.3f} of the writer{within}")


if __name__ == "__main__":
    main()
