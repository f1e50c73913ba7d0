"""Stall of an asynchronous checkpoint: how long it stops training, measured back to back."""

from __future__ import annotations

from dataclasses import dataclass

from iobench.bench.counters.monitor import Counted, Counters
from iobench.bench.data.replay import Replay
from iobench.bench.targets.base import OpenTarget
from iobench.checkpoint.manifest import name_of
from iobench.checkpoint.retention import KeepLast
from iobench.checkpoint.store import store_at
from iobench.checkpointer.checkpointer import Checkpointer
from iobench.results import Stored, utc_now
from iobench.writers.base import Writer
from iobench.writers.transfer import Transfer

SLOTS = 2
"""Snapshots that memory holds."""
SAVES = SLOTS + 3
"""Checkpoints of one measurement: one per slot to warm up, and three that count."""


@dataclass(frozen=True, kw_only=True)
class Stalled:
    """`stall_s`: mean seconds that a checkpoint stops training. The rest is for the verdict.

    `transfer` and `counted` are of all saves. `stored` is the inspection of the last checkpoint.
    """

    stall_s: float
    transfer: Transfer
    counted: Counted
    started: str
    stored: Stored | None


def measure_stall(replay: Replay, writer: Writer, target: OpenTarget, name: str) -> Stalled:
    """Save `replay`'s tensors five times in the background, and measure three of the stalls.

    Three checkpoints follow one another with two slots. The first takes its snapshot while no save
    runs, the second during a background save, and the third waits for a slot. The slots are
    prepared before the warm-up. No file is left behind.
    """
    replay.prepare()
    state = {str(number): dict(tensors) for number, tensors in enumerate(replay.states)}
    where = target.scratch.locate(name)
    started, counters = utc_now(), Counters(target.monitor)
    try:
        with Checkpointer(
            where, world="alone", writer=writer, slots=SLOTS, keep=KeepLast(1)
        ) as checkpointer:
            checkpointer.prepare(state, wait=True)
            for step in range(SLOTS):
                checkpointer.save_async(state, step)
            checkpointer.wait()
            stalls = [checkpointer.save_async(state, step).stall_s for step in range(SLOTS, SAVES)]
            checkpointer.wait()
            counted = counters.stop()
            return Stalled(
                stall_s=sum(stalls) / len(stalls),
                transfer=Transfer.total(one.transfer for one in checkpointer.saves if one.transfer),
                counted=counted,
                started=started,
                stored=_inspect(target, name, where, writer),
            )
    finally:
        target.scratch.remove(name)


def _inspect(target: OpenTarget, name: str, where: str, writer: Writer) -> Stored | None:
    """Inspect the last checkpoint; None where there are no files."""
    if target.instruments is None:
        return None
    manifest = store_at(where, writer).manifest(SAVES - 1)
    files = [(file.path, file.size_bytes) for file in manifest.files]
    return target.inspect(f"{name}/{name_of(manifest.step)}", files)
