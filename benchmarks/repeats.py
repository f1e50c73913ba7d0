"""What storage does with data that repeats: raw O_DIRECT writes of blocks, by their content.

    python benchmarks/repeats.py --target DIRECTORY [--size 4GiB] [--pool 1GiB] [--rounds 8]
        [--block 16MiB] [--threads 4] [--record FILE]

All arms copy from the same `--size` of random bytes in memory into the aligned blocks of the
threads, write each block by one `pwrite`, and sync the file at the end:

- `unique`: every byte of the memory once
- `one block`: the first block again and again
- `laps`: the first `--pool` of it, again and again
- `shifted laps`: the same, each lap from another multiple of 64 bytes that is not one of 512
- `shuffled laps`: the same blocks, in another order in each lap
- `keyed laps`: the same, XOR a key of the lap in place of the copy; the first key is 0, a copy
- `unique, no copy` and `laps, no copy`: from the memory itself, so that laps repeat addresses too

`laps` and `unique` differ in content alone, and the last two in addresses in addition. In each
round every arm writes a new file, in random order, on an idle device. The process needs `--size` of
memory. The machine must be idle.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import record
from numpy.typing import NDArray

from iobench import linux
from iobench.bench.targets.scratch import scratch_directory
from iobench.bench.targets.settle import settle
from iobench.environment import DeviceMonitor
from iobench.stats.comparison import LEAST_FLOOR, Comparison
from iobench.stats.estimates import median, paired_log_ratio
from iobench.units import GIB, MIB, parse_size
from iobench.writers.blocks.pages import fresh_pages

_SHIFT = 64  # of torch's CPU allocator
_SHIFTS = 7  # multiples of 64 between two multiples of 512


class Source(NamedTuple):
    """Where the bytes of a block begin in the memory, and the key that changes them; 0 for none."""

    start: int
    key: int = 0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Sizes in bytes. A lap has `per_lap` blocks."""

    size: int
    block: int
    threads: int
    per_lap: int


Arm = Callable[[int], Source]


def arms_of(asked: Asked, seed: int) -> dict[str, Arm]:
    """Return the arms: each returns the source of a block by its number."""
    chance = random.Random(seed)
    laps = -(-asked.size // asked.block // asked.per_lap)
    keys = [0, *(chance.getrandbits(64) | 1 for _ in range(laps))]
    orders = [list(range(asked.per_lap)) for _ in range(laps)]
    for order in orders[1:]:
        chance.shuffle(order)

    def in_lap(number: int) -> int:
        return number % asked.per_lap * asked.block

    def lap(number: int) -> int:
        return number // asked.per_lap

    def shuffled(number: int) -> Source:
        return Source(orders[lap(number)][number % asked.per_lap] * asked.block)

    return {
        "unique": lambda n: Source(n * asked.block),
        "one block": lambda _: Source(0),
        "laps": lambda n: Source(in_lap(n)),
        "shifted laps": lambda n: Source(in_lap(n) + _SHIFT * (lap(n) % _SHIFTS + 1)),
        "shuffled laps": shuffled,
        "keyed laps": lambda n: Source(in_lap(n), keys[lap(n)]),
        "unique, no copy": lambda n: Source(n * asked.block),
        "laps, no copy": lambda n: Source(in_lap(n)),
    }


def fill(memory: NDArray[np.uint8], seed: int) -> None:
    """Fill the memory with random bytes."""
    chance = np.random.Generator(np.random.SFC64(seed))
    for start in range(0, len(memory), 64 * MIB):
        part = memory[start : start + 64 * MIB]
        part[:] = np.frombuffer(chance.bytes(len(part)), dtype=np.uint8)


def write(
    path: Path,
    arm: Arm,
    memory: NDArray[np.uint8],
    blocks: Sequence[NDArray[np.uint8]],
    *,
    in_place: bool,
) -> float:
    """Write a new file, a block of `blocks` a thread, and return the seconds until it is durable.

    Space is reserved before the clock starts.
    """
    size = len(blocks[0])
    count = (len(memory) - linux.PAGE) // size
    numbers, lock = itertools.count(), threading.Lock()
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC, 0o600)

    def run(block: NDArray[np.uint8]) -> None:
        while True:
            with lock:
                number = next(numbers)
            if number >= count:
                return
            start, key = arm(number)
            source = memory[start : start + size]
            if in_place:
                block = source
            elif key:
                words = source.view(np.uint64)
                np.bitwise_xor(words, np.uint64(key), out=block.view(np.uint64))
            else:
                np.copyto(block, source)
            written = os.pwrite(fd, block.data, number * size)
            if written != size:
                raise OSError(f"{path}: {written} of {size} bytes were written")

    try:
        with suppress(OSError):  # no such call here: tmpfs, network file systems
            os.posix_fallocate(fd, 0, count * size)
        with ThreadPoolExecutor(len(blocks)) as threads:
            began_s = time.perf_counter()
            for done in [threads.submit(run, block) for block in blocks]:
                done.result()
            os.fsync(fd)
            return time.perf_counter() - began_s
    finally:
        os.close(fd)


def table(seconds: dict[str, list[float]], size: int) -> None:
    """Print the rate of each arm, and how many times that of its unique data it is."""
    print("| blocks | GiB/s | times unique | 95% interval | finding |")
    print("| --- | ---: | ---: | ---: | --- |")
    for name, taken in seconds.items():
        rate, base = size / median(taken) / GIB, "unique"
        if name.endswith(", no copy"):
            base = "unique, no copy"
        cells = ["", "", ""]
        if name != base:
            ratio = paired_log_ratio(seconds[base], taken)
            held = ratio.interval
            cells = [
                f"{ratio.ratio:.3f}",
                f"{held.low:.3f} to {held.high:.3f}" if held else "-",
                str(Comparison(ratio=ratio, floor=LEAST_FLOOR).finding),
            ]
        print(f"| {name} | {rate:.2f} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", type=parse_size, default=4 * GIB)
    parser.add_argument("--pool", type=parse_size, default=GIB)
    parser.add_argument("--block", type=parse_size, default=16 * MIB)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    record.add_option(parser)
    given = parser.parse_args()
    size = given.size // given.block * given.block
    asked = Asked(
        size=size,
        block=given.block,
        threads=given.threads,
        per_lap=max(1, given.pool // given.block),
    )
    if asked.per_lap * asked.block >= size:
        parser.error("--size must be larger than --pool: nothing repeats")
    memory = fresh_pages(size + linux.PAGE, huge=True)  # the last lap may be shifted
    blocks = [fresh_pages(asked.block, huge=True) for _ in range(asked.threads)]
    seconds: dict[str, list[float]] = {name: [] for name in arms_of(asked, 0)}
    with (
        scratch_directory(given.target) as directory,
        record.Record(given.record, target=given.target) as kept,
    ):
        monitor, path = DeviceMonitor(directory), directory / "blocks"
        for turn in range(given.rounds):
            fill(memory, turn)
            arms = arms_of(asked, turn)
            for name in random.sample(list(arms), len(arms)):
                settle(directory, monitor)
                in_place = name.endswith(", no copy")
                taken_s = write(path, arms[name], memory, blocks, in_place=in_place)
                path.unlink()
                seconds[name].append(taken_s)
                kept.sample(name, turn, taken_s, bytes=size)
    table(seconds, size)


if __name__ == "__main__":
    main()
