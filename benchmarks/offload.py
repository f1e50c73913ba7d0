"""Steps of offloaded AdamW next to fio's mixed job of the same traffic, in random order.

    python benchmarks/offload.py --target DIRECTORY [--parameters 300000000] [--rounds 5]
        [--memory 1GiB] [--steps 2] [--record FILE]

Arms of each round:

- `step`: `--steps` calls of AdamW.step with random bfloat16 gradients, then `wait`: all of it is
  durable when the clock stops. Each element is 12 B read and 14 B written. No two chunks are alike.
- `step and pin`: the same with a pin after each step.
- `fio iodepth=N numjobs=M`: reads and writes in the same proportion, as many bytes as one step, on
  a file of two generations in the same directory, direct, io_uring, blocks of 8 MiB, fsync at the
  end; random bytes that differ between blocks, in huge pages as those of the step. The best of the
  jobs is the ceiling of the round.

CPU seconds of each arm are those of this process (not of fio).

At the end: `resume` with the bytes that it read (/proc/self/io), and with `verify`, which reads the
whole state.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import arms
import torch

from iobench.offload import AdamW
from iobench.units import MIB, format_seconds, format_size

_TENSORS = 16
_READ, _WRITTEN = 12, 14  # bytes for each element of a bfloat16 parameter
_FIO = ((8, 1), (16, 1), (8, 2), (32, 1))


def offload_options(text: str | None, *, steps: int) -> argparse.ArgumentParser:
    """A parser of what offload_overlap.py takes too."""
    parser = arms.options(text)
    parser.add_argument("--parameters", type=float, default=3e8)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--memory", default="1GiB")
    return parser


def parameters_of(count: int) -> list[torch.nn.Parameter]:
    each = count // _TENSORS
    return [torch.nn.Parameter(torch.randn(each, dtype=torch.bfloat16)) for _ in range(_TENSORS)]


def step_arm(optimizer: AdamW, steps: int, *, pins: bool) -> float:
    began = time.perf_counter()
    for step in range(steps):
        optimizer.step()
        if pins:
            optimizer.pin(step)
    optimizer.wait()
    return (time.perf_counter() - began) / steps


def fio_arm(file: Path, elements: int, iodepth: int, numjobs: int) -> float:
    """Seconds that fio takes for the bytes of one step."""
    total = elements * (_READ + _WRITTEN)
    command = ["fio", "--name=mixed", f"--filename={file}", "--rw=rw", "--direct=1", "--bs=8m"]
    command += [f"--rwmixread={round(100 * _READ / (_READ + _WRITTEN))}", "--ioengine=io_uring"]
    command += [f"--iodepth={iodepth}", f"--numjobs={numjobs}", "--end_fsync=1"]
    command += [f"--size={file.stat().st_size // numjobs // MIB}m", "--output-format=json"]
    command += [f"--io_size={total // numjobs}", "--group_reporting", "--offset_increment=50%"]
    command += ["--scramble_buffers=1", "--buffer_compress_percentage=0", "--dedupe_percentage=0"]
    # glibc asks for huge pages: fio has an option for hugetlbfs only.
    own = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, env=own, check=True, capture_output=True, text=True)
    job = json.loads(done.stdout)["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    return float(total / (moved / (job["job_runtime"] / numjobs / 1e3)))


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("\nread_bytes: ")[1].split()[0])


def restore_arm(directory: Path, asked: argparse.Namespace, verify: bool) -> None:
    model = parameters_of(int(asked.parameters))
    before, began = read_bytes(), time.perf_counter()
    optimizer = AdamW.resume(model, directory, memory=asked.memory, verify=verify)
    elapsed_s, read = time.perf_counter() - began, read_bytes() - before
    optimizer.close()
    share = read / (14 * sum(len(one) for one in model))
    print(
        f"resume{' verify' if verify else ''}: {format_seconds(elapsed_s)}, "
        f"{format_size(read)} read, {share:.3f} of the state"
    )


def main() -> None:
    parser = offload_options(__doc__, steps=2)
    parser.add_argument("--iodepth", type=int, default=8)
    parser.add_argument("--block-size", default="4MiB")
    asked = parser.parse_args()
    with arms.recording(asked) as (scratch, kept):
        measure(asked, scratch, kept)


def measure(asked: argparse.Namespace, scratch: Path, kept: arms.Record) -> None:
    model = parameters_of(int(asked.parameters))
    elements = sum(len(one) for one in model)
    moved = elements * (_READ + _WRITTEN)
    optimizer = AdamW(
        model,
        scratch / "state",
        memory=asked.memory,
        iodepth=asked.iodepth,
        block_size=asked.block_size,
    )
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    for step in range(4):  # each slot is written once: the first write of reserved space costs more
        optimizer.step()
        optimizer.pin(step)
    optimizer.wait()
    file = scratch / "fio"
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, elements * 28 // (16 * MIB) * 16 * MIB)
    fio_arm(file, 2 * elements, 8, 1)  # writes most of it once
    every: dict[str, Callable[[], float]] = {
        "step": lambda: step_arm(optimizer, asked.steps, pins=False),
        "step and pin": lambda: step_arm(optimizer, asked.steps, pins=True),
    }
    for depth, jobs in _FIO:
        name = f"fio iodepth={depth} numjobs={jobs}"
        every[name] = lambda depth=depth, jobs=jobs: fio_arm(file, elements, depth, jobs)
    print(f"{elements:,} elements, {format_size(moved)} a step", flush=True)
    for turn, name in arms.in_rounds(every, asked.rounds):
        cpu = time.process_time()
        elapsed_s = every[name]()
        cpu_s = (time.process_time() - cpu) / (asked.steps if name.startswith("step") else 1)
        kept.sample(name, turn, elapsed_s, bytes=moved, cpu_s=cpu_s)
    kept.print_table()
    best = [
        min(one) for one in zip(*(kept.seconds(n) for n in every if n[:3] == "fio"), strict=True)
    ]
    steps, pinned = kept.seconds("step"), kept.seconds("step and pin")
    ratios = [one / own for one, own in zip(best, steps, strict=True)]
    print(f"step / fio: median {statistics.median(ratios):.3f}, worst {min(ratios):.3f}")
    pins = statistics.median(one / own for one, own in zip(pinned, steps, strict=True))
    print(f"step and pin: {pins:.2f} x the step")
    optimizer.close()
    for verify in (False, True):
        restore_arm(scratch / "state", asked, verify)
    shutil.rmtree(scratch / "state")


if __name__ == "__main__":
    main()
