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
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import record
import torch

from iobench.bench.targets.scratch import scratch_directory
from iobench.offload import AdamW
from iobench.units import MIB, format_rate, format_seconds, format_size

_TENSORS = 16
_READ, _WRITTEN = 12, 14  # bytes for each element of a bfloat16 parameter
_FIO = ((8, 1), (16, 1), (8, 2), (32, 1))


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
    done = subprocess.run(
        [
            *("fio", "--name=mixed", f"--filename={file}", "--rw=rw", "--direct=1"),
            *(f"--rwmixread={round(100 * _READ / (_READ + _WRITTEN))}", "--ioengine=io_uring"),
            *("--bs=8m", f"--iodepth={iodepth}", f"--numjobs={numjobs}", "--end_fsync=1"),
            *(f"--size={file.stat().st_size // numjobs // MIB}m", "--output-format=json"),
            *(f"--io_size={total // numjobs}", "--group_reporting", "--offset_increment=50%"),
            *("--scramble_buffers=1", "--buffer_compress_percentage=0", "--dedupe_percentage=0"),
        ],
        # glibc asks for huge pages: fio has an option for hugetlbfs only.
        env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        check=True,
        capture_output=True,
        text=True,
    )
    job = json.loads(done.stdout)["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    return float(total / (moved / (job["job_runtime"] / numjobs / 1e3)))


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("\nread_bytes: ")[1].split()[0])


def restore_arm(directory: Path, count: int, arguments: argparse.Namespace, verify: bool) -> None:
    model = parameters_of(count)
    before, began = read_bytes(), time.perf_counter()
    optimizer = AdamW.resume(model, directory, memory=arguments.memory, verify=verify)
    elapsed_s, read = time.perf_counter() - began, read_bytes() - before
    optimizer.close()
    share = read / (14 * sum(len(one) for one in model))
    print(
        f"resume{' verify' if verify else ''}: {format_seconds(elapsed_s)}, "
        f"{format_size(read)} read, {share:.3f} of the state"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--parameters", type=float, default=3e8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--iodepth", type=int, default=8)
    parser.add_argument("--block-size", default="4MiB")
    record.add_option(parser)
    arguments = parser.parse_args()
    count = int(arguments.parameters)
    with (
        scratch_directory(arguments.target) as scratch,
        record.Record(arguments.record, target=scratch) as samples,
    ):
        measure(arguments, count, Path(scratch), samples)


def measure(
    arguments: argparse.Namespace, count: int, scratch: Path, samples: record.Record
) -> None:
    model = parameters_of(count)
    elements = sum(len(one) for one in model)
    moved = elements * (_READ + _WRITTEN)
    optimizer = AdamW(
        model,
        scratch / "state",
        memory=arguments.memory,
        iodepth=arguments.iodepth,
        block_size=arguments.block_size,
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
    arms: dict[str, Callable[[], float]] = {
        "step": lambda: step_arm(optimizer, arguments.steps, pins=False),
        "step and pin": lambda: step_arm(optimizer, arguments.steps, pins=True),
    }
    for depth, jobs in _FIO:
        name = f"fio iodepth={depth} numjobs={jobs}"
        arms[name] = lambda depth=depth, jobs=jobs: fio_arm(file, elements, depth, jobs)
    times: dict[str, list[float]] = {name: [] for name in arms}
    cpus: dict[str, list[float]] = {}
    print(f"{elements:,} elements, {format_size(moved)} a step")
    for turn in range(arguments.rounds):
        for name in random.sample(sorted(arms), len(arms)):
            cpu = time.process_time()
            elapsed_s = arms[name]()
            cpu_s = (time.process_time() - cpu) / (arguments.steps if name[:4] == "step" else 1)
            times[name].append(elapsed_s)
            cpus.setdefault(name, []).append(cpu_s)
            samples.sample(name, turn, elapsed_s, bytes=moved, cpu_s=cpu_s)
        best = min(times[name][-1] for name in arms if name.startswith("fio"))
        print(
            f"round {turn}: step {times['step'][-1]:.2f} s "
            f"({format_rate(moved / times['step'][-1])}), {best / times['step'][-1]:.2f} of fio; "
            f"with a pin {times['step and pin'][-1] / times['step'][-1]:.2f} x the step",
            flush=True,
        )
    for name, found in times.items():
        print(
            f"{name:26} median {statistics.median(found):6.2f} s, "
            f"CPU {statistics.median(cpus[name]):6.2f} s   {[round(one, 2) for one in found]}"
        )
    fio = [min(one) for one in zip(*(t for n, t in times.items() if n[:3] == "fio"), strict=True)]
    ratios = [best / own for best, own in zip(fio, times["step"], strict=True)]
    print(f"step / fio: median {statistics.median(ratios):.3f}, worst {min(ratios):.3f}")
    optimizer.close()
    for verify in (False, True):
        restore_arm(scratch / "state", count, arguments, verify)
    shutil.rmtree(scratch / "state")


if __name__ == "__main__":
    main()
