"""CUDA tensors to storage and back: gds, other writers from the GPU, torch.save, PCIe and fio.

    python benchmarks/gpu.py --target DIRECTORY [--size 8GiB] [--rounds 3]

Saves are durable, restores cold and compared on the GPU. Prints the median of every arm and, for
our writers, paths and fallbacks: the mode that cuFile was in. Ends with 3 where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from iobench.bench import fio
from iobench.bench.targets.cold import make_cold
from iobench.bench.targets.scratch import scratch_directory
from iobench.formats import safetensors
from iobench.units import GIB, MIB, parse_size
from iobench.writers.registry import make
from iobench.writers.transfer import Transfer

TENSORS = 64
DEVICE = "cuda"
WRITERS = ("gds", "odirect", "uring", "hybrid", "buffered")


def main() -> int:
    """Returns the exit code."""
    arguments = _arguments()
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees no CUDA device. Nothing was measured.")
        return 3
    each = arguments.size // TENSORS
    state = {
        f"layer.{i}.weight": torch.randint(0, 256, (each,), dtype=torch.uint8, device=DEVICE)
        for i in range(TENSORS)
    }
    rates: dict[str, list[float]] = {}
    transfers: dict[str, Transfer] = {}
    print(f"{torch.cuda.get_device_name()}, {arguments.size / GIB:.1f} GiB, {arguments.target}")
    with scratch_directory(arguments.target) as directory:
        arms = _arms(directory, state, transfers)
        for _ in range(arguments.rounds):
            for name in random.sample(list(arms), len(arms)):
                save, restore = arms[name]
                _time(rates, f"{name} save", save, arguments.size)
                if restore is not None:
                    cold = make_cold(p for p in directory.iterdir() if p.name != "lock")
                    if cold.resident_fraction > 0.01:
                        sys.exit(f"{name}: {cold.resident_fraction:.1%} of the file is not cold")
                    found = _time(rates, f"{name} restore", restore, arguments.size)
                    if not all(torch.equal(found[k], state[k]) for k in state):
                        sys.exit(f"{name}: wrong bytes")
                    del found
                for left in directory.iterdir():
                    if left.name != "lock":
                        shutil.rmtree(left) if left.is_dir() else left.unlink()
            job = fio.FioJob(ioengine="io_uring", block_size=16 * MIB, iodepth=8)
            for operation in ("save", "restore"):
                sample = fio.run_job(job, operation, directory, job.size_for(arguments.size))
                rates.setdefault(f"fio {operation}", []).append(sample.bytes / sample.elapsed_s)
            fio.cleanup(directory)
    for name, found_rates in sorted(rates.items()):
        each_round = " ".join(f"{rate / MIB:.0f}" for rate in found_rates)
        print(f"{name:24} {statistics.median(found_rates) / MIB:7.0f} MiB/s   ({each_round})")
    for name, transfer in transfers.items():
        print(f"{name}: {dict(transfer.paths)}")
        for fallback in transfer.fallbacks:
            print(f"  {fallback.wanted} -> {fallback.used}: {fallback.reason}")
    return 0


def _arms(
    directory: Path, state: dict[str, torch.Tensor], transfers: dict[str, Transfer]
) -> dict[str, tuple[Callable[[], object], Callable[[], dict[str, torch.Tensor]] | None]]:
    arms: dict[str, tuple[Callable[[], object], Callable[[], dict[str, torch.Tensor]] | None]] = {}
    for name in WRITERS:
        writer = make(name)
        answer = writer.available(directory)
        if not answer.ok:
            print(f"{name} is not available: {answer.reason} {answer.remedy}")
            continue

        def save(name: str = name, writer: object = writer) -> None:
            transfers[f"{name} save"] = safetensors.save(state, "f", directory, writer)

        def restore(name: str = name, writer: object = writer) -> dict[str, torch.Tensor]:
            found, moved = safetensors.load("f", directory, writer, device=DEVICE)
            transfers[f"{name} restore"] = moved
            return found

        arms[name] = save, restore

    def stock_save() -> None:
        with (directory / "f").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    arms["torch.save"] = stock_save, lambda: torch.load(directory / "f", map_location=DEVICE)
    tensors = list(state.values())
    pinned = torch.empty_like(tensors[0], device="cpu", pin_memory=DEVICE == "cuda")

    def copy_out() -> None:
        for tensor in tensors:
            pinned.copy_(tensor, non_blocking=True)

    arms["PCIe copy to pinned"] = copy_out, None
    return arms


def _time(
    rates: dict[str, list[float]], name: str, call: Callable[[], object], size: int
) -> object:
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    rates.setdefault(name, []).append(size / (time.perf_counter() - began))
    return result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path, default=Path())
    parser.add_argument("--size", type=parse_size, default=8 * GIB)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
