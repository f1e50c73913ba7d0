"""Memory tiers: stalls of a burst of saves, how many snapshots memory holds, loads from memory.

    python benchmarks/tiers_memory.py --target DIRECTORY [--size 256MiB] [--rounds 5]
        [--record FILE]

- burst: as many saves as both memories hold, three times as fast as the storage, which is paced.
  The stall of each, and a plain copy of the same bytes into memory that is there already, halfway
  to the next save: both are made after a pause, while an earlier snapshot is written (torch with
  all threads and numpy, in turn: the one with the faster median counts)
- capacity: with storage that stands still and `on_full="skip"`: the saves that DRAM holds, and
  those that both memories hold, next to the computed numbers
- load: a load from memory, next to a plain copy of the bytes into new memory, and into memory
  that is there already, by as many threads

The slower memory is a directory on tmpfs: it is as fast as DRAM here.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import record
from async_save import make_state, tensors_of, timed
from support.slow_writer import SlowWriter

from iobench import Checkpointer, Memory
from iobench.bench.targets.scratch import scratch_directory
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import Serialized
from iobench.environment.memory import host_takes_free_memory
from iobench.units import GIB, MIB, format_seconds, parse_size
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.buffered import BufferedWriter
from iobench.writers.transfer import Meter, Transfer

_DRAM, _SLOW = 2.5, 3.75
"""Sizes of the memories in snapshots: one snapshot is spread over both."""
_SLOWER = 3  # how many times as fast as storage the saves are


class Standing(BufferedWriter):
    """Storage that stands still until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def write_many(self, *given: Any, **options: Any) -> Transfer:
        self.gate.wait()
        return super().write_many(*given, **options)


class Copies:
    """Plain copies of the tensors of a state, into memory that is there already."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._pairs = [(torch.ones_like(tensor), tensor) for tensor in tensors_of(state)]
        self._arrays = [
            tuple(one.reshape(-1).view(torch.uint8).numpy() for one in pair) for pair in self._pairs
        ]

    def by_torch(self) -> None:
        for copy, tensor in self._pairs:
            copy.copy_(tensor)

    def by_numpy(self) -> None:
        for copy, array in self._arrays:
            np.copyto(copy, array)


def memories(snapshot_bytes: int, *, slow: bool = True) -> list[Memory]:
    dram = Memory(int(_DRAM * snapshot_bytes))
    return [dram, Memory(int(_SLOW * snapshot_bytes), path="/dev/shm")] if slow else [dram]


def burst(
    directory: Path,
    state: dict[str, Any],
    size: int,
    every_s: float,
    copies: Copies,
    add: Callable[[str, float], None],
) -> None:
    """Make saves every `every_s` seconds, for all of which memory has room, and plain copies."""
    disk = SlowWriter(int(size / (_SLOWER * every_s)))
    with Checkpointer(directory, writer=disk, tiers=memories(size)) as ckpt:
        ckpt.prepare(state, wait=True)
        for step in range(int(_DRAM + _SLOW)):
            began_s = time.monotonic()
            save = ckpt.save_async(state, step)
            add(f"stall, {tier_of(save)}", save.stall_s)
            add("stall", save.stall_s)
            pause(began_s + every_s / 2)
            by = "torch" if step % 2 else "numpy"
            add(f"copy by {by}", timed(copies.by_torch if step % 2 else copies.by_numpy))
            pause(began_s + every_s)
    assert all(save.status == "committed" for save in ckpt.saves)


def tier_of(save: Save) -> str:
    """The memory that has the snapshot."""
    return save.copies[0].tier


def pause(until_s: float) -> None:
    time.sleep(max(0.0, until_s - time.monotonic()))


def capacity(directory: Path, state: dict[str, Any], size: int, *, slow: bool) -> int:
    """Return the number of saves that memory takes while storage stands still."""
    writer = Standing()
    with Checkpointer(
        directory, writer=writer, on_full="skip", tiers=memories(size, slow=slow)
    ) as ckpt:
        step = 0
        while ckpt.save_async(state, step).status != "skipped":
            step += 1
        writer.gate.set()
    return step


def loaded_s(ckpt: Checkpointer) -> float:
    """Return the seconds of a load, without those in which the loaded state is freed."""
    began_s = time.perf_counter()
    state = ckpt.load()
    ended_s = time.perf_counter()
    del state
    return ended_s - began_s


def new_memory(size_bytes: int) -> Any:
    """Return memory without pages, of the same kind as that of a load."""
    return fresh_pages(size_bytes, huge=not host_takes_free_memory())


def copied_s(source: Any, target: Any) -> float:
    """Return the seconds of a copy by the threads of a load."""

    def work(blocks: Blocks, _: Meter) -> None:
        for start, stop in blocks:
            np.copyto(target[start:stop], source[start:stop])

    return timed(lambda: run_workers(8, Blocks(0, len(source), 4 * MIB), work, Meter()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", default="256MiB")
    parser.add_argument("--rounds", type=int, default=5)
    record.add_option(parser)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    with (
        record.Record(arguments.record, target=arguments.target) as samples,
        scratch_directory(arguments.target) as scratch,
    ):
        state = make_state(parse_size(arguments.size))
        size, copies = Serialized.of(state).size_bytes, Copies(state)

        def add(arm: str, turn: int, elapsed_s: float) -> None:
            seconds.setdefault(arm, []).append(elapsed_s)
            samples.sample(arm, turn, elapsed_s, bytes=size)

        for slow in (False, True):
            held = capacity(scratch / f"capacity-{slow}", state, size, slow=slow)
            computed = int(_DRAM + _SLOW * slow)
            print(
                f"{'ok  ' if held == computed else 'MISS'} {held} saves held, {computed} computed"
            )
        copies.by_torch()
        every_s = max(0.5, 6 * timed(copies.by_numpy))
        loads = Checkpointer(scratch / "loads", tiers=[Memory(size + MIB)])
        loads.save_async(state, 1)
        loads.wait()
        source, warm = fresh_pages(size, huge=True), fresh_pages(size, huge=True)
        source[:], warm[:] = 1, 1
        order = random.Random(0)
        for turn in range(arguments.rounds):
            at = scratch / f"burst-{turn}"
            burst(at, state, size, every_s, copies, lambda arm, s, turn=turn: add(arm, turn, s))
            work = {
                "load": lambda: loaded_s(loads),
                "copy, new memory": lambda: copied_s(source, new_memory(size)),
                "copy, same memory": lambda: copied_s(source, warm),
            }
            for arm in order.sample(list(work), len(work)):
                add(arm, turn, work[arm]())
            assert loads.loaded is not None
            assert loads.loaded.sources == {"memory": "read"}
            print(f"round {turn + 1} of {arguments.rounds} done", flush=True)
        loads.close()
    print(f"\n{size / GIB:.2f} GiB, a save every {format_seconds(every_s)}")
    middle = {arm: statistics.median(times) for arm, times in seconds.items()}
    copy_s = min(middle["copy by torch"], middle["copy by numpy"])
    for arm, times in seconds.items():
        each = " ".join(f"{one:.3f}" for one in sorted(times))
        rate = size / middle[arm] / GIB
        print(f"{arm:34} {format_seconds(middle[arm]):>8} {rate:6.2f} GiB/s  s: {each}")
    for ok, what in (
        (
            middle["stall"] <= 1.1 * copy_s,
            f"stall / copy {middle['stall'] / copy_s:.2f}",
        ),
        (
            middle["copy, new memory"] >= 0.8 * middle["load"],
            f"load {middle['copy, new memory'] / middle['load']:.2f} x copy into new memory",
        ),
    ):
        print("ok  " if ok else "MISS", what)


if __name__ == "__main__":
    main()
