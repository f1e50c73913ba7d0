"""together: a step that all ranks do, and that fails in all of them if it fails in one."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from iobench.errors import RankError
from iobench.ranks.calls import CallKind, json_bytes
from iobench.ranks.control import Control, shared_control
from iobench.ranks.world import World
from iobench.writers.s3_store.target import is_s3

T = TypeVar("T")


def together(
    control: Control,
    phase: str,
    work: Callable[[], T],
    tell: Callable[[T], Any] | None = None,
    *,
    deadline_s: float,
    kind: CallKind = "all-gather",
) -> tuple[T, list[Any]]:
    """Call `work` in every rank. Return its result, and those of all ranks, in rank order.

    `tell` makes JSON of a result for the others; without it the result is JSON itself. With `kind`
    "gather" only rank 0 gets the list; it is empty in the others. With "scatter" the result of rank
    0 is a list, and each rank gets its own item of it, as the only one.

    If either raises, so does this in every rank: the rank's own error where it happened, a
    RankError that names the rank in the others. The ranks can go on after that.
    """
    own, answer = begin_together(
        control, phase, work, tell, deadline_s=deadline_s, kind=kind, acknowledged=True
    )
    return own, answer()


def begin_together(
    control: Control,
    phase: str,
    work: Callable[[], T],
    tell: Callable[[T], Any] | None = None,
    *,
    deadline_s: float,
    kind: CallKind = "all-gather",
    acknowledged: bool = False,
) -> tuple[T, Callable[[], list[Any]]]:
    """Like `together`, but return a function that waits for the results of all ranks. Call it once.

    An error of `work` is raised at once, after the other ranks have got it. Unless `acknowledged`,
    rank 0 does not wait until the others have the values: a trainer waits for this.
    """
    own, value, failure = cast(T, None), None, None
    try:
        own = work()
        value = own if tell is None else tell(own)
    except Exception as error:
        if control.world.size == 1:
            raise
        failure = error
    try:
        answer = control.begin(
            kind, phase, value, deadline_s=deadline_s, error=failure, acknowledged=acknowledged
        )
        if failure is not None:
            answer()  # it raises in all ranks
    except RankError as theirs:
        if failure is not None:
            raise failure from theirs
        raise
    return own, answer


def distinct(control: Control, phase: str, work: Callable[[], T], *, deadline_s: float) -> list[T]:
    """Return the results of `work` in all ranks, in rank order, as JSON. See `together`.

    Equal ones are sent once: the ranks compare hashes first.
    """

    def digest(value: T) -> str:
        return hashlib.sha256(json_bytes(value)).hexdigest()

    if control.world.size == 1:
        return [work()]
    own, digests = together(control, phase, work, digest, deadline_s=deadline_s)
    first = [digests.index(one) for one in digests]
    if not any(first):
        return [own] * len(first)
    rank = control.world.rank
    sent = own if first[rank] == rank else None
    every = control.all_gather(phase, sent, deadline_s=deadline_s)
    return [every[one] for one in first]


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
        self,
        phase: str,
        work: Callable[[], T],
        tell: Callable[[T], Any] | None = None,
        kind: CallKind = "all-gather",
    ) -> tuple[T, list[Any]]:
        """Call `work` in every rank. See `iobench.ranks.together.together`."""
        return together(self.trainer, phase, work, tell, deadline_s=self.deadline_s, kind=kind)

    def agreed(self, phase: str, work: Callable[[], Any]) -> list[Any]:
        """Return the results of `work` in all ranks. An error is raised in all of them."""
        return self.together(phase, work)[1]

    def led(self, phase: str, ask: Callable[[], T]) -> T:
        """Return in all ranks what `ask` returns in rank 0, as JSON; raise what it raises."""
        told: list[T] = self.agreed(phase, lambda: ask() if self.leads else None)
        return told[0]


ALONE = JobRanks.of(World.single(), "", math.inf)
"""This process only: no call asks another one."""
