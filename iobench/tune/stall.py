"""Stall of an asynchronous checkpoint: how long it stops training, measured back to back."""

from __future__ import annotations

from iobench.bench.data.replay import Replay
from iobench.bench.targets.base import Scratch
from iobench.checkpoint.checkpointer import Checkpointer
from iobench.checkpoint.retention import KeepLast
from iobench.writers.base import Writer

__all__ = ["SAVES", "SLOTS", "measure_stall"]

SLOTS = 2
"""Snapshots that memory holds."""
SAVES = SLOTS + 3
"""Checkpoints of one measurement: one per slot to warm up, and three that count."""


def measure_stall(replay: Replay, writer: Writer, scratch: Scratch, name: str) -> float:
    """Return the seconds that a checkpoint of `replay`'s tensors stops training, the mean of three.

    Three checkpoints follow one another with two slots. The first takes its snapshot while no save
    runs, the second during a background save, and the third waits for a slot. The warm-up has
    allocated the memory of the slots. No file is left behind.
    """
    replay.prepare()
    state = {str(number): dict(tensors) for number, tensors in enumerate(replay.states)}
    try:
        with Checkpointer(
            str(scratch.locate(name)), writer=writer, slots=SLOTS, keep=KeepLast(1)
        ) as checkpointer:
            for step in range(SLOTS):
                checkpointer.save_async(state, step)
            checkpointer.wait()
            stalls = [checkpointer.save_async(state, step).stall_s for step in range(SLOTS, SAVES)]
            checkpointer.wait()
    finally:
        scratch.remove(name)
    return sum(stalls) / len(stalls)
