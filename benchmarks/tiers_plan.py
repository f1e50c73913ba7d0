"""`iobench tiers plan` compared with live runs: stalls, and when saves are durable in each tier.

    python benchmarks/tiers_plan.py --target DIRECTORY [--size 128MiB] [--record FILE]

Three runs of 8 saves, with paced memories, paced local storage and a real S3 server (rclone), to
which copies are limited:

- keeps up: everything is durable before the next save
- local too slow: both memories fill, and saves wait for room; every save is written, in order
- remote too slow: saves wait for copies (`on_lag="wait"`, `max_lag_size`)

Each is simulated with the rates of storage that `iobench tiers` shows after three saves, which are
left out. A line has the sum of the stalls, and the mean time from the begin of a save to durable in
both tiers: live, predicted, and the difference.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import record
import torch

from iobench import Checkpointer, Local, Memory, Paced, Remote
from iobench.bench.targets.scratch import scratch_directory
from iobench.checkpoint.save import Save
from iobench.testing import LocalS3, local_s3
from iobench.tiers.plan import PlannedMemory, Prediction, TiersPlan
from iobench.tiers.simulation import simulate
from iobench.tiers.status import tiers_status
from iobench.units import MIB, parse_size

_SAVES, _WARM = 8, 3
_MOST = 0.10
_LOOK_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Live:
    """What a run measured: seconds of each save. `plan` has the rates of the first saves."""

    plan: TiersPlan
    stalls_s: list[float]
    local_s: list[float]
    remote_s: list[float]


def plans(size: int) -> dict[str, TiersPlan]:
    """The runs. Rates are in checkpoints per second, so that a size changes no proportion."""
    memories = tuple(
        PlannedMemory(name=name, size_bytes=count * size, rate_bytes_per_s=rate * size)
        for name, count, rate in (("memory", 2, 4), ("slow memory", 2, 2))
    )
    keeps_up = TiersPlan(
        size_bytes=size,
        every_s=10.0,
        saves=_SAVES,
        memories=memories,
        local_rate=size // 2,
        remote_rate=size // 4,
        every_save=True,
        on_lag="wait",
    )
    return {
        "keeps up": keeps_up,
        "local too slow": replace(
            keeps_up, every_s=1.0, local_rate=size // 3, remote_rate=size // 2
        ),
        "remote too slow": replace(keeps_up, every_s=1.5, local_rate=size, max_lag_bytes=3 * size),
    }


class Watch:
    """Notes when each save becomes durable, by looking at it every 2 ms."""

    def __init__(self, remote: str) -> None:
        self._remote, self._began = remote, list[tuple[Save, float]]()
        self.local_s: dict[int, float] = {}
        self.remote_s: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def began(self, save: Save, at_s: float) -> None:
        self._began.append((save, at_s))

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self.look()

    def look(self) -> None:
        now_s = time.perf_counter()
        for save, at_s in tuple(self._began):
            if save.step not in self.local_s and save.status == "committed":
                self.local_s[save.step] = now_s - at_s
            there = [one.state for one in save.copies if one.tier == self._remote]
            if save.step not in self.remote_s and there in (["durable"], ["verified"]):
                self.remote_s[save.step] = now_s - at_s

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        self.look()


def live(plan: TiersPlan, state: dict[str, Any], directory: Path, remote: str) -> Live:
    """Run a plan, after three saves that measure the rates."""
    assert plan.remote_rate is not None
    fast, slow = plan.memories
    tiers = [
        Paced(Memory(_room(fast)), fast.rate_bytes_per_s),
        Paced(Memory(_room(slow), path="/dev/shm"), slow.rate_bytes_per_s),
        Paced(Local(), plan.local_rate),
        Remote(
            remote,
            bandwidth_limit=plan.remote_rate,
            every_save=plan.every_save,
            max_lag_size=plan.max_lag_bytes,
        ),
    ]
    saves, stalls = [], []
    with Checkpointer(directory, tiers=tiers) as ckpt:
        ckpt.prepare(state, wait=True)
        for step in range(_WARM):
            ckpt.save_async(state, step)
            ckpt.wait(until="remote")
            while ckpt._tier.drain.queue.pending():  # its read-back
                time.sleep(0.1)
        status = tiers_status(directory)
        watch = Watch(remote)
        for step in range(_WARM, _WARM + plan.saves):
            time.sleep(plan.every_s)
            began_s = time.perf_counter()
            saves.append(ckpt.save_async(state, step))
            stalls.append(time.perf_counter() - began_s)
            watch.began(saves[-1], began_s)
        ckpt.wait(until="remote")
        watch.end()
    steps = range(_WARM, _WARM + plan.saves)
    return Live(
        plan=replace(
            plan,
            local_rate=round(1 / status.local_rate.s_per_byte),
            remote_rate=round(1 / status.remote_rate.s_per_byte),
        ),
        stalls_s=stalls,
        local_s=[watch.local_s[step] for step in steps],
        remote_s=[watch.remote_s[step] for step in steps],
    )


def _room(memory: PlannedMemory) -> int:
    """The size of a tier: whole huge pages for each slot."""
    return memory.size_bytes + 16 * MIB


def compare(name: str, found: Live, predicted: Prediction, samples: record.Record) -> bool:
    """Print and record the figures; return whether all are within 10%."""
    rows = {
        "stall, sum": (sum(found.stalls_s), sum(predicted.stalls_s)),
        "durable locally": (
            statistics.mean(found.local_s),
            statistics.mean(predicted.lags_local_s),
        ),
        "durable remotely": (
            statistics.mean(found.remote_s),
            statistics.mean(predicted.lags_remote_s),
        ),
    }
    good = True
    for turn, (what, (measured_s, predicted_s)) in enumerate(rows.items()):
        off = predicted_s / measured_s - 1
        good = good and abs(off) <= _MOST
        print(f"{name:16} {what:17} {measured_s:8.3f} s live, {predicted_s:8.3f} s ({off:+.1%})")
        samples.sample(f"{name}, {what}", turn, measured_s, predicted_s=predicted_s)
    each = " ".join(
        f"{own:.2f}/{one.stall_s:.2f}"
        for own, one in zip(found.stalls_s, predicted.saves, strict=True)
    )
    print(f"{'':16} stalls live/predicted: {each}", flush=True)
    return good


def measure(server: LocalS3, directory: Path, size: int, samples: record.Record) -> None:
    state = {"w": torch.randint(0, 256, (size - 1024,), dtype=torch.uint8)}
    for number, (name, plan) in enumerate(plans(size).items()):
        remote = f"{server.target}/run-{number}"
        found = live(plan, state, directory / f"run-{number}", remote)
        good = compare(name, found, simulate(found.plan), samples)
        print(f"{'ok  ' if good else 'MISS'} {name}: within {_MOST:.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", default="128MiB")
    record.add_option(parser)
    arguments = parser.parse_args()
    with (
        record.Record(arguments.record, target=arguments.target) as samples,
        scratch_directory(arguments.target) as scratch,
        local_s3() as server,
        server.active(),
    ):
        measure(server, Path(scratch), parse_size(arguments.size), samples)


if __name__ == "__main__":
    main()
