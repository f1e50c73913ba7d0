"""Latency of each block by `odirect` in one thread, against that of `fio --lat_percentiles=1`.

    python benchmarks/latency.py --target DIRECTORY [--size 1GiB] [--rounds 5] [--bs 1MiB]

Both write and read the same traffic: blocks with O_DIRECT, one in flight, unique bytes, memory in
huge pages, reserved space, one fsync at the end. In pages of 4 KiB a block has as many parts as the
kernel happens to find pages that lie apart: on one virtio disk a read of 1 MiB took 0.4 to 1.3 ms.
They take turns in random order. A percentile is that of all operations of all rounds. For fio,
whose operations cannot be pooled, it is the median of the rounds, as it is for `odirect` in the
second column. The machine must be idle: the device has no other latency for one of them only then.
As root it reserves huge pages for fio and gives them back.

    python benchmarks/latency.py --delays

does so on a file system of known latencies (delays.py), 128 MiB in blocks of 64 KiB: there the
percentiles of both must be equal, whatever the machine does.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

from iobench.bench.targets.scratch import scratch_directory
from iobench.bench.targets.settle import settle
from iobench.environment import DeviceMonitor
from iobench.units import KIB, MIB, parse_size
from iobench.writers.image import FileImage
from iobench.writers.latency import Latency
from iobench.writers.registry import make
from iobench.writers.transfer import Transfer

_RESERVED = Path("/proc/sys/vm/nr_hugepages")
PERCENTILES = (50.0, 95.0, 99.0, 99.9)
Operation = str
Rounds = dict[Operation, list[dict[float, float]]]


def huge_pages(size_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return memory in huge pages, like that of fio's buffers here."""
    huge = 2 * MIB
    room = mmap.mmap(-1, size_bytes + huge, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(room, dtype=np.uint8)
    begin = -memory.ctypes.data % huge
    return memory[begin : begin + size_bytes]


@contextmanager
def reserved_pages(count: int) -> Iterator[None]:
    """Reserve `count` huge pages for fio in the body."""
    before = int(_RESERVED.read_text())
    _RESERVED.write_text(str(before + count))
    try:
        yield
    finally:
        _RESERVED.write_text(str(before))


@contextmanager
def delays() -> Iterator[Path]:
    """Mount the file system of delays.py in a new directory for the body."""
    program = Path(__file__).with_name("delays.py")
    with (
        tempfile.TemporaryDirectory() as name,
        subprocess.Popen([sys.executable, program, name]) as process,
    ):
        try:
            while not Path(name).is_mount():
                if process.poll() is not None:
                    raise SystemExit(f"{program} ended with {process.returncode}")
                time.sleep(0.02)
            yield Path(name)
        finally:
            subprocess.run(["umount", name], check=False)
            process.terminate()


def fill(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], seed: int) -> None:
    random_bytes = np.random.default_rng(seed)
    for start in range(0, len(memory), 64 * MIB):
        part = memory[start : start + 64 * MIB]
        part[:] = np.frombuffer(random_bytes.bytes(len(part)), dtype=np.uint8)


def by_odirect(image: FileImage, directory: Path, block_size: int) -> list[tuple[str, Transfer]]:
    writer = make("odirect", block_size=block_size, threads=1)
    saved = writer.write(image, directory)
    # As fio reads: each block into the same memory, which the caches of the CPU hold by then.
    (segment,) = image.segments
    block = segment.memory[:block_size]
    again = FileImage.of(image.path, [block] * (image.size_bytes // block_size))
    restored = writer.read(again, directory)
    (directory / image.path).unlink()
    return [("write", saved), ("read", restored)]


def by_fio(
    directory: Path, size_bytes: int, block_size: int
) -> dict[Operation, dict[float, float]]:
    common = [
        *("fio", "--name=latency", f"--directory={directory}", f"--size={size_bytes}"),
        *(f"--bs={block_size}", "--ioengine=psync", "--direct=1", "--thread", "--iomem=mmaphuge"),
        *(
            "--refill_buffers=1",
            f"--fallocate={'none' if block_size < MIB else 'native'}",
            "--lat_percentiles=1",
            "--clat_percentiles=0",
        ),
        *("--percentile_list=" + ":".join(map(str, PERCENTILES)), "--output-format=json"),
    ]
    found = {}
    for operation, more in (("write", ["--end_fsync=1"]), ("read", ["--allow_file_create=0"])):
        done = subprocess.run(
            [*common, f"--rw={operation}", *more], check=True, capture_output=True, text=True
        )
        latency = json.loads(done.stdout)["jobs"][0][operation]["lat_ns"]
        found[operation] = {
            one: latency["percentile"][f"{one:.6f}"] / 1e9 for one in PERCENTILES
        } | {100.0: latency["max"] / 1e9}
    for path in directory.glob("latency.*"):
        path.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--target", type=Path)
    where.add_argument("--delays", action="store_true")
    parser.add_argument("--size", type=parse_size)
    parser.add_argument("--bs", type=parse_size)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    asked.size = asked.size or (128 if asked.delays else 1024) * MIB
    asked.bs = asked.bs or (64 * KIB if asked.delays else MIB)

    memory = huge_pages(asked.size)
    image = FileImage.of("blocks", [memory])
    fio: Rounds = defaultdict(list)
    ours: Rounds = defaultdict(list)
    pooled: dict[Operation, list[Latency]] = defaultdict(list)
    pages = 8 + asked.bs // (2 * MIB)
    with (
        reserved_pages(pages),
        delays() if asked.delays else nullcontext(asked.target) as target,
        scratch_directory(target) as directory,
    ):
        monitor = DeviceMonitor(directory)
        for number in range(asked.rounds):
            for arm in random.sample(("fio", "odirect"), 2):
                fill(memory, number)
                os.sync()
                settle(directory, monitor)
                if arm == "fio":
                    for operation, found in by_fio(directory, asked.size, asked.bs).items():
                        fio[operation].append(found)
                    continue
                for operation, transfer in by_odirect(image, directory, asked.bs):
                    latency = transfer.latencies[operation]
                    pooled[operation].append(latency)
                    ours[operation].append(
                        {one: latency.percentile_s(one) for one in (*PERCENTILES, 100.0)}
                    )
    print("| operation | percentile | odirect, all rounds (ms) | odirect (ms) | fio (ms) | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for operation, latencies in pooled.items():
        together = Latency.total(latencies)
        for one in (*PERCENTILES, 100.0):
            mine = statistics.median(found[one] for found in ours[operation])
            other = statistics.median(found[one] for found in fio[operation])
            name = "max" if one == 100 else f"p{one:g}"
            print(
                f"| {operation} | {name} | {1000 * together.percentile_s(one):.3f} "
                f"| {1000 * mine:.3f} | {1000 * other:.3f} | {mine / other:.3f} |"
            )


if __name__ == "__main__":
    main()
