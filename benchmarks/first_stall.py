"""Compare the first `save_async` of a process with a plain copy into fresh memory.

    python benchmarks/first_stall.py --target DIRECTORY [--tensors 1000] [--size 954MiB]
        [--processes 12]

Each process measures both once. Which one comes first alternates from process to process, because
the first one may have to wait for memory from the host of a virtual machine. A small save comes
before, so that imports and the start of threads do not count. The ratio of each process is printed,
with the CPU seconds of the stall.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from iobench.bench.judging.stats import median
from iobench.bench.targets.scratch import scratch_directory
from iobench.units import parse_size

_CHILD = """
import json, sys, time
import torch
from iobench import Checkpointer, linux

directory, tensors, size, arms = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
state = {f"layers.{n}.weight": torch.randn(size // tensors // 4) for n in range(tensors)}
with Checkpointer(f"{directory}/warm-up") as ckpt:
    ckpt.save_async({"model": {"w": torch.ones(1000)}}, 0)
found = {}
for arm in arms:
    if arm == "copy":
        linux.trim_heap()
        began_s = time.perf_counter()
        copies = [tensor.clone() for tensor in state.values()]
        found[arm] = time.perf_counter() - began_s
        del copies
    else:
        with Checkpointer(f"{directory}/first") as ckpt:
            began_s, cpu_s = time.perf_counter(), time.process_time()
            ckpt.save_async({"model": state}, 0)
            found[arm] = time.perf_counter() - began_s
            found["CPU"] = time.process_time() - cpu_s
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--size", type=parse_size, default="954MiB")
    parser.add_argument("--processes", type=int, default=12)
    given = parser.parse_args()
    ratios = []
    print("| first arm | plain copy | first save_async | CPU of it | ratio |")
    print("|---|---:|---:|---:|---:|")
    for number in range(given.processes):
        arms = ("copy", "stall") if number % 2 else ("stall", "copy")
        with scratch_directory(given.target) as scratch:
            asked = [str(scratch), str(given.tensors), str(given.size), *arms]
            command = [sys.executable, "-c", _CHILD, *asked]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(answer.stdout)
        ratios.append(found["stall"] / found["copy"])
        shown = [f"{1000 * found[name]:.0f} ms" for name in ("copy", "stall", "CPU")]
        print("|", " | ".join([arms[0], *shown, f"{ratios[-1]:.2f}"]), "|", flush=True)
    print(f"\nmedian of the ratios: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
