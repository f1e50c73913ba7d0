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

import time
from pathlib import Path

import arms
import numpy as np
import torch

import iobench
from iobench.bench.targets.directory import scratch_directory
from iobench.bench.targets.settle import settled
from iobench.environment import DeviceMonitor
from iobench.remote.journal import DrainJournal
from iobench.units import GIB, parse_size
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
    parser = arms.options(__doc__, rounds=8)
    parser.add_argument("--local", type=Path, required=True)
    parser.add_argument("--size", type=parse_size, default=4 * GIB)
    parser.add_argument("--writer", type=iobench.load_writer, default="hybrid")
    given = parser.parse_args()
    monitor = DeviceMonitor(given.target)
    with arms.Record(given.record, target=given.target) as kept:
        for turn, arm in arms.in_rounds(("writer", "drain"), given.rounds):
            with scratch_directory(given.target) as target:
                with settled(target, monitor):
                    memory = torch.from_numpy(np.random.default_rng(turn).random(given.size // 8))
                if arm == "writer":
                    taken_s = writes(memory, target, given.writer)
                else:
                    taken_s = drains(memory, target, given.writer, given.local)
            kept.sample(arm, turn, taken_s, bytes=given.size)
    kept.print_table()
    ratio, interval, _ = kept.ratio("writer", "drain")
    print(f"the drain reaches {ratio} of the writer, 95% interval {interval}")


if __name__ == "__main__":
    main()
