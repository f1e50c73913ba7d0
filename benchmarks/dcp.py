r"""DCP with stock file system classes and with ours, saves durable, loads cold, in random order.

    python benchmarks/dcp.py --target DIRECTORY [--size 2GiB] [--rounds 3] [--writer odirect] \
        [--record FILE]

The state is tensors of 64 MiB. Everything is compared after each load.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import record
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from iobench.bench.targets.cold import make_cold
from iobench.bench.targets.scratch import scratch_directory
from iobench.bench.targets.settle import settle
from iobench.environment import DeviceMonitor
from iobench.integrations.dcp import StorageReader, StorageWriter
from iobench.units import MIB, parse_size
from iobench.writers.local.new_file import sync_directory

_TENSOR = 64 * MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--writer", default="odirect,uring")
    record.add_option(parser)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    count = max(1, parse_size(asked.size) // _TENSOR)
    state = {f"t{n}": torch.randint(0, 255, (_TENSOR,), dtype=torch.uint8) for n in range(count)}
    arms: dict[str, tuple[Any, Any]] = {
        f"stock, {threads} threads": (
            lambda p, threads=threads: FileSystemWriter(p, thread_count=threads),
            FileSystemReader,
        )
        for threads in (1, 2)
    }
    for name in asked.writer.split(","):
        arms[f"iobench {name}"] = (
            lambda p, name=name: StorageWriter(p, name),
            lambda p, name=name: StorageReader(p, name),
        )
    rates: dict[tuple[str, str], list[float]] = {}
    with (
        record.Record(asked.record, target=asked.target) as samples,
        scratch_directory(asked.target) as scratch,
    ):
        monitor = DeviceMonitor(scratch)
        for turn in range(asked.rounds):
            for arm in random.sample(list(arms), len(arms)):
                place = scratch / "checkpoint"
                settle(scratch, monitor)
                for what, seconds in one_round(state, place, *arms[arm]):
                    rates.setdefault((arm, what), []).append(count * 64 / seconds)
                    samples.sample(f"{what} {arm}", turn, seconds, bytes=count * _TENSOR)
                shutil.rmtree(place)
    for (arm, what), found in sorted(rates.items(), key=lambda item: (item[0][1], item[0][0])):
        spread = " ".join(f"{rate:.0f}" for rate in sorted(found))
        print(f"{what:5} {arm:20} {statistics.median(found):7.0f} MiB/s  ({spread})")


def one_round(
    state: dict[str, torch.Tensor], place: Path, writer: Any, reader: Any
) -> list[tuple[str, float]]:
    began = time.perf_counter()
    dcp.save(state, storage_writer=writer(place), no_dist=True)
    sync_directory(place)  # stock leaves that out
    save_s = time.perf_counter() - began
    make_cold(path for path in place.iterdir())
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    began = time.perf_counter()
    dcp.load(found, storage_reader=reader(place), no_dist=True)
    load_s = time.perf_counter() - began
    if not all(torch.equal(found[name], tensor) for name, tensor in state.items()):
        raise SystemExit("wrong bytes")
    return [("save", save_s), ("load", load_s)]


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
