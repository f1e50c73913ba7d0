"""RankCommitter: the ranks write one checkpoint together, in two phases.

    rank 0                                  each rank
    makes step-N's hidden directory
    announces it                      ->    writes its file, then its part manifest, synced
    collects the votes                <-    votes
    looks at every part itself
    writes index and manifest, renames
    announces the commit              ->    knows that the checkpoint is durable

A rank that fails votes so, and nothing becomes visible. The hidden directory has a random name, so
a rank of an earlier start of the job cannot write into it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.persister import Snapshot
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import CheckpointStore
from iobench.dist.control import Control
from iobench.dist.replicas.offering import Offering
from iobench.dist.replicas.recovery import Version
from iobench.dist.replicas.replicator import Replicator
from iobench.dist.saves.assembly import Assembly
from iobench.dist.saves.content import RankContent
from iobench.dist.saves.part_writer import PartWriter
from iobench.errors import RankError, TransferError
from iobench.writers.image import Bytes
from iobench.writers.s3_store.target import is_s3

__all__ = ["RankCommitter"]


_NEXT = "next checkpoint"


class Order(NamedTuple):
    """What rank 0 announced: which save is written next, and where."""

    number: int
    step: int
    directory: str
    serial: int


@dataclass(kw_only=True)
class RankCommitter:
    """Commits checkpoints of all ranks. `ledger` and `assembly` are those of rank 0."""

    control: Control
    store: CheckpointStore
    parts: PartWriter
    deadline_s: float
    ledger: Ledger | None
    assembly: Assembly | None
    replicator: Replicator | None = None
    committed: Callable[[], None] = lambda: None
    _order: Order | None = field(default=None, init=False)

    def commit(self, save: Save, content: RankContent, memory: Bytes | None = None) -> None:
        """Write the checkpoint with the other ranks. On return it is durable and visible.

        Every rank calls it. A save that has failed in this rank, see its `error`, takes part in
        order to tell the others. Raises RankError, with the name of the rank that failed; then
        no part of the checkpoint is visible. A save that rank 0 did not choose is `superseded`.
        """
        began_s = time.perf_counter()
        if self.ledger is not None:
            self._lead(self.ledger, save, content, memory)
        elif not self._follow(save, content, memory):
            save.status = "superseded"
            return
        save.persist_s = time.perf_counter() - began_s
        save.status = "committed"

    def persist(self, snapshot: Snapshot[RankContent]) -> None:
        """Commit a snapshot; the callback of the persister."""
        memory = None if snapshot.slot is None else snapshot.memory
        self.commit(snapshot.save, snapshot.content, memory)

    def _lead(self, ledger: Ledger, save: Save, content: RankContent, memory: Bytes | None) -> None:
        with contextlib.ExitStack() as stack:
            try:
                if save.error is not None:
                    raise save.error
                serial, replace = ledger.new_serial(), ledger.holds(save.step)
                staged = stack.enter_context(
                    self.store.staged(save.step, serial=serial, replace=replace, shared=True)
                )
            except BaseException as failure:
                self._tell(_NEXT, failure)
                raise
            order = Order(content.number, save.step, os.fspath(staged.directory), serial)
            self.control.broadcast(_NEXT, order._asdict(), deadline_s=self.deadline_s)
            votes = self._vote(save, content, memory, order)
            phase = _commit_phase(save.step)
            try:
                assert self.assembly is not None
                self.assembly.publish(
                    save, content.plan, staged, votes, serial, _attempt_of(order)
                )
            except BaseException as failure:
                self._tell(phase, failure)
                raise
            save.status = "committed"
            self.control.broadcast(phase, deadline_s=self.deadline_s)
        ledger.committed(save, serial)
        self.committed()

    def _follow(self, save: Save, content: RankContent, memory: Bytes | None) -> bool:
        """Return False, and do nothing, if rank 0 chose a later save."""
        order = self._order
        if order is None:
            order = Order(**self.control.broadcast(_NEXT, deadline_s=self.deadline_s))
        self._order = order if order.number > content.number else None
        if self._order is not None:
            return False
        directory = order.directory if is_s3(order.directory) else Path(order.directory)
        try:
            self._vote(save, content, memory, order)
            self.control.broadcast(_commit_phase(order.step), deadline_s=self.deadline_s)
        except RankError as failure:
            # Rank 0 may publish this part although another rank was lost: it has the votes, and
            # the loss is told to all ranks at once. Only a call that fails says that it does not.
            if not self.control.broken:
                self._discard(directory, failure)
            raise
        return True

    def _vote(
        self, save: Save, content: RankContent, memory: Bytes | None, order: Order
    ) -> list[str]:
        """Write this rank's part and vote. Return the checksums of all part manifests in rank 0.

        Raises RankError for all ranks if one of them failed.
        """
        phase = f"vote on step {order.step}"
        save.status = "writing"
        version = Version(order.serial, order.step, _attempt_of(order))
        with Offering(self.replicator, version, save.created_s) as offering:
            try:
                if save.error is not None:
                    raise save.error
                if offering.wanted and self.assembly is not None:
                    offering.table = self.assembly.table(content.plan)
                save.transfer, checksum = self.parts.write(
                    content, memory, order.directory, offering
                )
            except BaseException as failure:
                self._tell(phase, failure)
                raise
        found: list[str] = self.control.gather(phase, checksum, deadline_s=self.deadline_s)
        return found

    def _tell(self, phase: str, failure: BaseException) -> None:
        """Tell all ranks that this one failed, by the call that they make in this phase.

        Raises the RankError that the others raise too, with `failure` as its cause. For Ctrl-C and
        the like it returns.
        """
        try:
            call = self.control.gather if phase.startswith("vote") else self.control.broadcast
            call(phase, error=_shown(failure), deadline_s=self.deadline_s)
        except RankError as told:
            if isinstance(failure, Exception):
                raise told from failure

    def _discard(self, directory: str | Path, failure: BaseException) -> None:
        try:
            self.parts.discard(directory)
        except TransferError as error:
            failure.add_note(f"{directory}: what was written could not be removed ({error})")


def _attempt_of(order: Order) -> str:
    """Return the random name of the hidden directory: no other save has it."""
    return os.path.basename(order.directory.rstrip("/"))


def _commit_phase(step: int) -> str:
    return f"commit of step {step}"


def _shown(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"
