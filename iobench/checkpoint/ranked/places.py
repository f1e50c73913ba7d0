"""SavePlace: where rank 0 lets all ranks write a checkpoint, and the one of every Checkpointer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.ranked.assembly import Assembly
from iobench.checkpoint.ranked.order import Order
from iobench.checkpoint.ranked.plan import RankPlan
from iobench.checkpoint.save import Save
from iobench.checkpoint.staged import Staged
from iobench.checkpoint.store import CheckpointStore

__all__ = ["LocalPlace", "SavePlace"]


class SavePlace(Protocol):
    """A tier in which all ranks write one checkpoint. For rank 0."""

    remote: bool
    limit_s: float | None
    """How long each rank may write its part; None: no limit."""

    def staged(self, save: Save, serial: int) -> AbstractContextManager[Staged]:
        """Begin a checkpoint of all ranks."""

    def publish(
        self, save: Save, plan: RankPlan, staged: Staged, votes: Sequence[str], order: Order
    ) -> None:
        """Make it visible and durable."""

    def committed(self, save: Save, serial: int) -> None:
        """Record it, then remove what retention drops."""

    def instead(self, save: Save, failure: BaseException) -> SavePlace | None:
        """Return where the save is written after this `failure`; None: nowhere."""

    def probe_bytes(self, ranks: int) -> int:
        """Return the bytes that each rank writes to measure the local tier; 0: it is not."""

    def probed(self, size_bytes: int, elapsed_s: float, *, ok: bool) -> None:
        """Record this measurement."""


@dataclass(kw_only=True)
class LocalPlace:
    """The directory or bucket of the Checkpointer. `decision` says why it was chosen, if it was.

    `noted` is called after the commit, and `warning` is given.
    """

    store: CheckpointStore
    ledger: Ledger
    assembly: Assembly
    decision: str = ""
    warning: str = ""
    noted: Callable[[Save], None] = lambda _: None
    remote: bool = field(default=False, init=False)
    limit_s: float | None = field(default=None, init=False)

    def staged(self, save: Save, serial: int) -> AbstractContextManager[Staged]:
        replace = self.ledger.holds(save.step)
        return self.store.staged(save.step, serial=serial, replace=replace, shared=True)

    def publish(
        self, save: Save, plan: RankPlan, staged: Staged, votes: Sequence[str], order: Order
    ) -> None:
        self.assembly.publish(
            save, plan, staged, votes, order.serial, order.attempt, decision=self.decision
        )

    def committed(self, save: Save, serial: int) -> None:
        self.ledger.committed(save, serial)
        self.noted(save)
        if self.warning:  # last: a warnings filter may turn it into an exception
            warnings.warn(self.warning, RuntimeWarning, stacklevel=2)

    def instead(self, save: Save, failure: BaseException) -> None:
        """There is no other place."""

    def probe_bytes(self, ranks: int) -> int:
        del ranks
        return 0

    def probed(self, size_bytes: int, elapsed_s: float, *, ok: bool) -> None:
        """Nothing is measured after a save to it."""
