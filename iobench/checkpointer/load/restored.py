"""restore_together: all ranks restore the version that they have chosen together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, cast

from iobench.checkpoint.load.reader import piece_reader
from iobench.checkpoint.ranked.content import data_file
from iobench.checkpoint.restore import Loaded, OnCorrupt
from iobench.checkpoint.store import CheckpointStore
from iobench.checkpointer.load.ranks import NextTier, load_together
from iobench.checkpointer.memory.reader import MemoryFirst
from iobench.errors import DataMismatchError
from iobench.ranks.control import Control
from iobench.ranks.restore_plan import RestoreMode
from iobench.replicas.recovery import Version
from iobench.replicas.restoring import Chosen, Restoring
from iobench.writers.base import Writer

__all__ = ["FromMemory", "restore_together"]

FromMemory = Callable[[Version, CheckpointStore, Writer], MemoryFirst | None]
"""Returns what reads a version from the memory tiers of the ranks; a call of all ranks."""


def restore_together(
    restoring: Restoring,
    control: Control,
    step: int | Literal["latest"],
    *,
    on_corrupt: OnCorrupt,
    like: Any,
    restore_mode: RestoreMode,
    deadline_s: float,
    next_tier: NextTier | None = None,
    from_memory: FromMemory | None = None,
) -> tuple[Any, Loaded, Version]:
    """Return the state of `step`, after `restoring.look`. See `load_together` and `Restoring`.

    Replicas in memory that turn out to be damaged are left out, and another version is chosen.
    """
    while True:
        chosen = restoring.choose()
        try:
            state, loaded = _load(
                restoring,
                chosen,
                control,
                step,
                on_corrupt=on_corrupt,
                like=like,
                restore_mode=restore_mode,
                deadline_s=deadline_s,
                next_tier=next_tier,
                from_memory=from_memory,
            )
            return state, loaded, restoring.version_of(loaded.step, chosen)
        except DataMismatchError as error:
            if chosen is None or not chosen.only_in_memory or step != "latest":
                raise
            restoring.without(chosen.plan, str(error))


def _load(
    restoring: Restoring,
    chosen: Chosen | None,
    control: Control,
    step: int | Literal["latest"],
    *,
    on_corrupt: OnCorrupt,
    like: Any,
    restore_mode: RestoreMode,
    deadline_s: float,
    next_tier: NextTier | None,
    from_memory: FromMemory | None,
) -> tuple[Any, Loaded]:
    """Load what was chosen; without a choice, let the load say what is wrong."""
    store = chosen.store if chosen else restoring.store
    writer = chosen.writer if chosen else restoring.writer
    serials, memory = restoring.serials, None
    if from_memory is not None and chosen is not None:
        memory = from_memory(chosen.plan.version, store, writer)
    owners = None
    if memory is not None and chosen is not None:
        writer = cast(Writer, memory)
        owners = {data_file(rank): rank for rank in range(restoring.world.size)}
        next_tier = _memory_first(memory, chosen.plan.version.step, next_tier)
    try:
        with piece_reader(
            control, writer, restore_mode, deadline_s=deadline_s, owners=owners
        ) as reader:
            return load_together(
                restoring.together,
                restoring.world,
                store,
                writer,
                chosen.plan.version.step if chosen else step,
                on_corrupt=on_corrupt,
                like=like,
                known=serials() if serials is not None and step == "latest" else None,
                reader=reader,
                next_tier=next_tier,
            )
    finally:
        for note in chosen.close() if chosen else ():
            warnings.warn(f"a replica was replaced: {note}", RuntimeWarning, stacklevel=6)


def _memory_first(memory: MemoryFirst, step: int, after: NextTier | None) -> NextTier:
    """Return what leaves memory for storage first, and then storage for `after`."""

    def next_tier(damaged: int, problem: str) -> bool:
        if damaged == step and memory.leave(problem):
            return True
        return after is not None and after(damaged, problem)

    return next_tier
