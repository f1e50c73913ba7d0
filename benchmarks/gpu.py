"""CUDA tensors to storage and back: gds, other writers from the GPU, torch.save, PCIe and fio.

    python benchmarks/gpu.py --target DIRECTORY [--size 8GiB] [--rounds 3] [--record FILE]

Saves are durable, restores cold and compared on the GPU. Prints the median of every arm and, for
our writers, paths and fallbacks: the mode that cuFile was in. Ends with 3 where there is no GPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arms
import torch

from iobench.bench import fio
from iobench.bench.targets.cold import make_cold
from iobench.formats import safetensors
from iobench.units import GIB, MIB, parse_size
from iobench.writers.local.directory_lock import LOCK
from iobench.writers.registry import make
from iobench.writers.transfer import Transfer

TENSORS = 64
DEVICE = "cuda"
WRITERS = ("gds", "odirect", "uring", "hybrid", "buffered")


def main() -> int:
    """Returns the exit code."""
    parser = arms.options(__doc__, rounds=3)
    parser.add_argument("--size", type=parse_size, default=8 * GIB)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees no CUDA device. Nothing was measured.")
        return 3
    state = {
        f"layer.{i}.weight": torch.randint(
            0, 256, (asked.size // TENSORS,), dtype=torch.uint8, device=DEVICE
        )
        for i in range(TENSORS)
    }
    transfers: dict[str, Transfer] = {}
    print(f"{torch.cuda.get_device_name()}, {asked.size / GIB:.1f} GiB, {asked.target}")
    job = fio.FioJob(ioengine="io_uring", block_size=16 * MIB, iodepth=8)
    with arms.recording(asked) as (directory, kept):
        every = _arms(directory, state, transfers)
        for turn, name in arms.in_rounds([*every, "fio"], asked.rounds):
            if name == "fio":
                for operation in ("save", "restore"):
                    with fio.started(job, operation, directory, asked.size) as measure:
                        one = measure()
                    kept.sample(f"{operation} fio", turn, one.elapsed_s, bytes=one.bytes)
                fio.cleanup(directory)
                continue
            save, restore = every[name]
            _, elapsed_s = _timed(save)
            kept.sample(f"save {name}", turn, elapsed_s, bytes=asked.size)
            if restore is not None:
                cold = make_cold(path for path in directory.iterdir() if path.name != LOCK)
                if cold.resident_fraction > 0.01:
                    sys.exit(f"{name}: {cold.resident_fraction:.1%} of the file is not cold")
                found, elapsed_s = _timed(restore)
                kept.sample(f"restore {name}", turn, elapsed_s, bytes=asked.size)
                if not all(torch.equal(found[key], state[key]) for key in state):
                    sys.exit(f"{name}: wrong bytes")
                del found
            (directory / "f").unlink(missing_ok=True)
    kept.print_table()
    for name, transfer in transfers.items():
        print(f"{name}: {dict(transfer.paths)}")
        for fallback in transfer.fallbacks:
            print(f"  {fallback.wanted} -> {fallback.used}: {fallback.reason}")
    return 0


State = dict[str, torch.Tensor]
Arm = tuple[Callable[[], object], Callable[[], State] | None]
"""A save and its restore."""


def _arms(directory: Path, state: State, transfers: dict[str, Transfer]) -> dict[str, Arm]:
    every: dict[str, Arm] = {}
    for name in WRITERS:
        writer = make(name)
        answer = writer.available(directory)
        if not answer.ok:
            print(f"{name} is not available: {answer.reason} {answer.remedy}")
            continue

        def save(name: str = name, writer: object = writer) -> None:
            transfers[f"{name} save"] = safetensors.save(state, "f", directory, writer)

        def restore(name: str = name, writer: object = writer) -> State:
            found, moved = safetensors.load("f", directory, writer, device=DEVICE)
            transfers[f"{name} restore"] = moved
            return found

        every[name] = save, restore

    def stock_save() -> None:
        with (directory / "f").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    every["torch.save"] = stock_save, lambda: torch.load(directory / "f", map_location=DEVICE)
    tensors = list(state.values())
    pinned = torch.empty_like(tensors[0], device="cpu", pin_memory=DEVICE == "cuda")

    def copy_out() -> None:
        for tensor in tensors:
            pinned.copy_(tensor, non_blocking=True)

    every["PCIe copy to pinned"] = copy_out, None
    return every


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What `call` returns, and the seconds until the GPU is done."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return result, time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
