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
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import arms

from iobench.bench.targets.directory import scratch_directory
from iobench.bench.targets.settle import settled
from iobench.environment import DeviceMonitor
from iobench.units import KIB, MIB, parse_size
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import FileImage
from iobench.writers.registry import make
from iobench.writers.transfer import Latency

_RESERVED = Path("/proc/sys/vm/nr_hugepages")
PERCENTILES = (50.0, 95.0, 99.0, 99.9)


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
            if subprocess.run(["umount", name], check=False).returncode:
                process.terminate()  # else it ends by itself, and removes its files


def points(latency: Latency) -> dict[float, float]:
    """Return the seconds of each percentile; 100 is the longest."""
    return {one: latency.percentile_s(one) for one in (*PERCENTILES, 100.0)}


def by_odirect(image: FileImage, directory: Path, block_size: int) -> dict[str, Latency]:
    writer = make("odirect", block_size=block_size, threads=1)
    saved = writer.write(image, directory)
    # As fio reads: each block into the same memory, which the caches of the CPU hold by then.
    (segment,) = image.segments
    block = segment.memory[:block_size]
    again = FileImage.of(image.path, [block] * (image.size_bytes // block_size))
    restored = writer.read(again, directory)
    (directory / image.path).unlink()
    return {"write": saved.latencies["write"], "read": restored.latencies["read"]}


def by_fio(directory: Path, size_bytes: int, block_size: int) -> dict[str, dict[float, float]]:
    command = ["fio", "--name=latency", f"--directory={directory}", f"--size={size_bytes}"]
    command += [f"--bs={block_size}", "--ioengine=psync", "--direct=1", "--thread"]
    command += ["--iomem=mmaphuge", "--refill_buffers=1", "--output-format=json"]
    command += [f"--fallocate={'none' if block_size < MIB else 'native'}"]
    command += ["--lat_percentiles=1", "--clat_percentiles=0"]
    command += ["--percentile_list=" + ":".join(map(str, PERCENTILES))]
    found = {}
    for operation, more in (("write", ["--end_fsync=1"]), ("read", ["--allow_file_create=0"])):
        done = subprocess.run(
            [*command, f"--rw={operation}", *more], check=True, capture_output=True, text=True
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

    memory = fresh_pages(asked.size, huge=True)  # huge pages, like those of fio's buffers
    image = FileImage.of("blocks", [memory])
    found: dict[str, dict[str, list[dict[float, float]]]] = {"fio": {}, "odirect": {}}
    pooled: dict[str, list[Latency]] = defaultdict(list)
    with (
        reserved_pages(8 + asked.bs // (2 * MIB)),
        delays() if asked.delays else nullcontext(asked.target) as target,
        scratch_directory(target) as directory,
    ):
        monitor = DeviceMonitor(directory)
        for turn, arm in arms.in_rounds(found, asked.rounds):
            with settled(directory, monitor):
                arms.fill(memory, turn)
            if arm == "fio":
                figures = by_fio(directory, asked.size, asked.bs)
            else:
                latencies = by_odirect(image, directory, asked.bs)
                for operation, latency in latencies.items():
                    pooled[operation].append(latency)
                figures = {operation: points(one) for operation, one in latencies.items()}
            for operation, one in figures.items():
                found[arm].setdefault(operation, []).append(one)
    rows = []
    for operation, latencies in pooled.items():
        for point, together_s in points(Latency.total(latencies)).items():
            name = "max" if point == 100 else f"p{point:g}"
            mine, other = (
                statistics.median(one[point] for one in found[arm][operation])
                for arm in ("odirect", "fio")
            )
            times = (f"{1000 * seconds:.3f}" for seconds in (together_s, mine, other))
            rows.append([operation, name, *times, f"{mine / other:.3f}"])
    head = ["operation", "percentile", "odirect, all rounds (ms)", "odirect (ms)", "fio (ms)"]
    print("".join(arms.markdown([*head, "ratio"], rows)))


if __name__ == "__main__":
    main()
