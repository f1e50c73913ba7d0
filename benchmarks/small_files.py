"""A directory of many small files, saved durable by several writers, in random order.

    python benchmarks/small_files.py --target DIRECTORY [--files 10000] [--rounds 3] [--record FILE]

Files of 1 to 64 KiB. Each writer saves them twice: "one by one" calls `write` for each with
`sync_directory=False` and syncs the directory once at the end, as a checkpoint does; "together"
calls `write_many`. All of it is inside the clock, and every file is compared afterwards.

All files stay until the end (40 KB each, for 6 arms and each round): without a journal, ext4 gives
the inode of a deleted file to no other for a minute and more, and every new file looks at all of
those first. Leave a few minutes between runs.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import record

from iobench.bench.targets.scratch import scratch_directory
from iobench.bench.targets.settle import settle
from iobench.environment import DeviceMonitor
from iobench.units import KIB, MIB
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.local.new_file import sync_directory
from iobench.writers.registry import make

WRITERS = ["hybrid", "buffered", "odirect"]


def make_images(files: int) -> list[FileImage]:
    pool = np.random.default_rng(1).integers(0, 256, 4 * MIB, np.uint8)
    rng, images = random.Random(1), []
    for number in range(files):
        size = rng.randint(KIB, 64 * KIB)
        start = rng.randrange(len(pool) - size)
        images.append(FileImage.of(f"file-{number:05}", [pool[start : start + size]]))
    return images


def one_by_one(writer: Writer, images: list[FileImage], directory: Path) -> None:
    for image in images:
        writer.write(image, directory, sync_directory=False)
    sync_directory(directory)


def together(writer: Writer, images: list[FileImage], directory: Path) -> None:
    writer.write_many(images, directory)


WAYS: dict[str, Callable[[Writer, list[FileImage], Path], None]] = {
    "one by one": one_by_one,
    "together": together,
}


def spread(directory: Path) -> None:
    """Have ext4 place each new directory inside by itself, away from recently deleted files.

    Other file systems know no such flag. Without it the first rounds may be slower than the last.
    """
    if not shutil.which("chattr"):
        print("chattr is not installed (e2fsprogs): files deleted lately may slow ext4 down")
        return
    subprocess.run(["chattr", "+T", directory], check=False, capture_output=True)


def check(images: list[FileImage], directory: Path) -> None:
    for image in images:
        wanted = image.views(0, image.size_bytes)[0].tobytes()
        if (directory / image.path).read_bytes() != wanted:
            raise SystemExit(f"{image.path}: wrong bytes")


def report(seconds: dict[tuple[str, str], list[float]], files: int) -> None:
    """Rates, and the ratios that were asked for; before the files are removed, which takes long."""
    rates = {arm: files / statistics.median(times) for arm, times in seconds.items()}
    for (name, way), rate in sorted(rates.items(), key=lambda item: -item[1]):
        each = " ".join(f"{one:.2f}" for one in sorted(seconds[name, way]))
        print(f"{name:10} {way:12} {rate:7.0f} files/s   s: {each}")
    for way in dict.fromkeys(way for _, way in rates):
        for other, target in (("odirect", 3.0), ("buffered", 0.9)):
            ratio = rates["hybrid", way] / rates[other, way]
            verdict = "ok  " if ratio >= target else "MISS"
            print(f"{verdict} {ratio:5.2f} (>= {target})  hybrid / {other}, {way}")
    if len(rates) == len(WRITERS):
        return
    ratio = rates["hybrid", "together"] / rates["odirect", "one by one"]
    verdict = "ok  " if ratio >= 3.0 else "MISS"
    print(f"{verdict} {ratio:5.2f} (>= 3.0)  hybrid together / odirect one by one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=sorted(WAYS), help="one of the two ways only")
    record.add_option(parser)
    arguments = parser.parse_args()
    images = make_images(arguments.files)
    ways = {name: way for name, way in WAYS.items() if arguments.way in (None, name)}
    arms = [(name, way) for name in WRITERS for way in ways]
    seconds: dict[tuple[str, str], list[float]] = {arm: [] for arm in arms}
    order = random.Random(0)
    with (
        record.Record(arguments.record, target=arguments.target) as samples,
        scratch_directory(arguments.target) as scratch,
    ):
        spread(scratch)
        monitor = DeviceMonitor(scratch)
        for turn in range(arguments.rounds):
            order.shuffle(arms)
            for name, way in arms:
                directory = scratch / f"{turn}-{name}-{way}".replace(" ", "-")
                writer = make(name)
                directory.mkdir()
                settle(scratch, monitor)
                began = time.perf_counter()
                ways[way](writer, images, directory)
                elapsed_s = time.perf_counter() - began
                seconds[name, way].append(elapsed_s)
                samples.sample(f"{name}, {way}", turn, elapsed_s, files=arguments.files)
                check(images, directory)
            print(f"round {turn + 1} of {arguments.rounds} done", flush=True)
        report(seconds, arguments.files)


if __name__ == "__main__":
    main()
