"""JobRanks: the ranks of the job that a Checkpointer saves, and the calls that they make together.

In a job of one rank each call returns at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iobench.ranks.control import Control, shared_control
from iobench.ranks.together import T, together
from iobench.ranks.world import World
from iobench.writers.s3_store.target import is_s3

__all__ = ["JobRanks"]

_made: weakref.WeakKeyDictionary[Control, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class JobRanks:
    """`trainer` and `background` are for the calls of these threads."""

    trainer: Control
    background: Control
    deadline_s: float

    @classmethod
    def of(cls, world: World, location: str | Path, deadline_s: float) -> JobRanks:
        """Connect the ranks of `world`, each of which makes a Checkpointer of `location` now."""
        if world.size == 1:
            alone = Control(World.single())
            return cls(trainer=alone, background=alone, deadline_s=deadline_s)
        shared = shared_control(world, None if is_s3(location) else Path(location))
        # All ranks make their Checkpointers in the same order.
        number = _made[shared] = _made.get(shared, 0) + 1
        control = shared.sub(f"checkpointer {number}")
        return cls(
            trainer=control.sub("trainer"),
            background=control.sub("persister"),
            deadline_s=deadline_s,
        )

    @property
    def world(self) -> World:
        """This rank among the others."""
        return self.trainer.world

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which has the lock of the directory and decides."""
        return self.world.rank == 0

    @property
    def many(self) -> bool:
        """Whether there is more than one rank."""
        return self.world.size > 1

    def together(
        self, phase: str, work: Callable[[], T], tell: Callable[[T], Any] | None = None
    ) -> tuple[T, list[Any]]:
        """Call `work` in every rank. See `iobench.ranks.together.together`."""
        return together(self.trainer, phase, work, tell, deadline_s=self.deadline_s)

    def agreed(self, phase: str, work: Callable[[], Any]) -> list[Any]:
        """Return the results of `work` in all ranks. An error is raised in all of them."""
        return self.together(phase, work)[1]
