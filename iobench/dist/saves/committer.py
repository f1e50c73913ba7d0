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

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.manifest import PinnedGeneration
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
from iobench.writers.image import Bytes, FileImage
from iobench.writers.s3_store.target import is_s3

if TYPE_CHECKING:
    from iobench.dist.drain.ranked_drain import RankedDrain

__all__ = ["Pins", "RankCommitter"]


_NEXT = "next checkpoint"
_BEGIN = "the begin of a save"


class Order(NamedTuple):
    """What rank 0 announced: which save is written next, and where.

    `failed` has the errors of ranks: the save has failed before it had a directory. `gone` are the
    numbers of saves that are superseded.
    """

    number: int
    step: int
    directory: str = ""
    serial: int = 0
    failed: Mapping[str, str] = MappingProxyType({})
    gone: Sequence[int] = ()

    @property
    def attempt(self) -> str:
        """The random name of the hidden directory: no other save has it."""
        return os.path.basename(self.directory.rstrip("/"))


class Committed(NamedTuple):
    """What this rank has written of a checkpoint: its file, which is in memory still."""

    serial: int
    file: FileImage


class Pins(Protocol):
    """The pins that the saves of a rank hold in its optimizer."""

    def durable(self, save: Save) -> PinnedGeneration:
        """Wait until the pin of `save` is durable."""

    def ended(self, save: Save, attempt: str | None) -> None:
        """The checkpoint of `save` exists and has this `attempt`, or None: it never will."""


@dataclass(kw_only=True)
class RankCommitter:
    """Commits checkpoints of all ranks on `hosts`. `ledger` and `assembly` are those of rank 0."""

    control: Control
    store: CheckpointStore
    parts: PartWriter
    deadline_s: float
    ledger: Ledger | None
    assembly: Assembly | None
    hosts: Sequence[str]
    replicator: Replicator | None = None
    committed: Callable[[], None] = lambda: None
    drain: RankedDrain | None = None
    pins: Pins | None = None
    gone: Callable[[], list[int]] = list
    """Returns the numbers of superseded saves that were not announced yet, in rank 0."""
    _order: Order | None = field(default=None, init=False)

    def commit(
        self, save: Save, content: RankContent, memory: Bytes | None = None
    ) -> Committed | None:
        """Write the checkpoint with the other ranks. On return it is durable and visible.

        Every rank calls it. A save that has failed in this rank, see its `error`, takes part in
        order to tell the others. Raises RankError, with the name of the rank that failed; then
        no part of the checkpoint is visible. A save that rank 0 did not choose is `superseded`:
        None is returned.
        """
        began_s = time.perf_counter()
        if self.ledger is not None:
            committed = self._lead(self.ledger, save, content, memory)
        else:
            found = self._follow(save, content, memory)
            if found is None:
                save.status = "superseded"
                return None
            committed = found
        save.persist_s = time.perf_counter() - began_s
        save.status = "committed"
        return committed

    def persist(self, snapshot: Snapshot[RankContent]) -> Committed | None:
        """Commit a snapshot; the callback of the persister."""
        memory = None if snapshot.slot is None else snapshot.memory
        return self.commit(snapshot.save, snapshot.content, memory)

    def announced(self) -> Order:
        """Wait until rank 0 has announced its next save. For the other ranks; it begins nothing."""
        if self._order is None:
            found = self.control.broadcast(_NEXT, deadline_s=self.deadline_s)
            self._order = Order(**found)
        return self._order

    def _lead(
        self, ledger: Ledger, save: Save, content: RankContent, memory: Bytes | None
    ) -> Committed:
        order, announced = Order(content.number, save.step, gone=self.gone()), False
        own: _Own | None = None
        try:
            if save.error is not None:
                raise save.error
            serial = ledger.serial_of(save) if save.serial else ledger.new_serial()
            replace = ledger.holds(save.step)
            with self.store.staged(
                save.step, serial=serial, replace=replace, shared=True
            ) as staged:
                order = order._replace(directory=os.fspath(staged.directory), serial=serial)
                announced = True
                self._announce(order)
                own = self._part(save, content, memory, order)
                votes = self._votes(own, order)
                assert self.assembly is not None
                self.assembly.publish(save, content.plan, staged, votes, serial, order.attempt)
                save.status = "committed"
                try:
                    ledger.committed(save, serial)
                    self.committed()
                finally:
                    self._ended(save, order)
        except RankError:  # of a call: every rank knows
            raise
        except BaseException as failure:
            if save.status != "committed":
                self._ended(save, None)
            # What was written is removed by now: the others see to what is left on their nodes.
            if save.status == "committed":
                self._conclude(order, None)
                raise
            raise self._conclude(order, failure, announced=announced) from failure
        self._conclude(order, None)
        assert own is not None
        return Committed(order.serial, own.written())

    def _announce(self, order: Order) -> None:
        told = {**order._asdict(), "failed": dict(order.failed), "gone": list(order.gone)}
        self.control.broadcast(_NEXT, told, deadline_s=self.deadline_s)

    def _conclude(
        self, order: Order, failure: BaseException | None, *, announced: bool = True
    ) -> BaseException:
        """Tell the others how the save ended. Return what this rank raises."""
        failed: dict[str, str] = {}
        if isinstance(failure, _VoteError):
            failed = failure.failed
        elif failure is not None:
            failed = {"0": _shown(failure)}
        if not announced:
            self._announce(order._replace(failed=failed))
            return self._error(_BEGIN, failed)
        phase = _commit_phase(order.step)
        self.control.broadcast(phase, {"failed": failed}, deadline_s=self.deadline_s)
        if isinstance(failure, Exception) or failure is None:
            return self._error(phase, failed)
        return failure  # Ctrl-C

    def _error(self, phase: str, failed: Mapping[str, str]) -> RankError:
        """Return the error of a save that failed in these ranks."""
        ranks = sorted(map(int, failed))
        texts = [
            f"rank {one} (host {self.hosts[one]}), {phase}: {failed[str(one)]}" for one in ranks
        ]
        return RankError("; ".join(texts), ranks=ranks)

    def _follow(self, save: Save, content: RankContent, memory: Bytes | None) -> Committed | None:
        """Return None, and do nothing, if rank 0 chose another save."""
        order = self.announced()
        if order.number != content.number:
            self._ended(save, None)
            return None
        self._order = None
        if order.failed:
            self._ended(save, None)
            raise self._error(_BEGIN, order.failed)
        own = self._part(save, content, memory, order)
        self._cast(order, own.vote)
        phase = _commit_phase(order.step)
        failed = self.control.broadcast(phase, deadline_s=self.deadline_s)["failed"]
        if failed:
            error = self._error(phase, failed)
            self._ended(save, None)
            self._discard(order, error)
            raise error from own.failure
        self._ended(save, order)
        return Committed(order.serial, own.written())

    def _ended(self, save: Save, order: Order | None) -> None:
        """All ranks know whether the checkpoint exists. Not called when a rank is lost before."""
        if self.pins is not None:
            self.pins.ended(save, None if order is None else order.attempt)

    def _votes(self, own: _Own, order: Order) -> list[str]:
        """Collect the votes, that of rank 0 too. Return the checksums of all parts.

        Raises _VoteError if a rank failed.
        """
        votes = self._cast(order, own.vote)
        failed = {f"{rank}": vote["error"] for rank, vote in enumerate(votes) if "error" in vote}
        if own.failure is not None and not isinstance(own.failure, Exception):
            raise own.failure
        if failed:
            raise _VoteError(failed) from own.failure
        return [vote["checksum"] for vote in votes]

    def _cast(self, order: Order, vote: dict[str, str]) -> list[dict[str, str]]:
        """Vote. Return the votes of all ranks in rank 0."""
        phase = f"vote on step {order.step}"
        return self.control.gather(phase, vote, deadline_s=self.deadline_s)

    def _part(self, save: Save, content: RankContent, memory: Bytes | None, order: Order) -> _Own:
        """Write the part of this rank."""
        save.status = "writing"
        version = Version(order.serial, order.step, order.attempt)
        drain = self.drain
        waits = drain.saving(order.step, order.serial) if drain is not None else nullcontext()
        try:
            with waits, Offering(self.replicator, version, save.created_s) as offering:
                if save.error is not None:
                    raise save.error
                if offering.wanted and self.assembly is not None:
                    offering.table = self.assembly.table(content.plan)
                pinned = None if self.pins is None else self.pins.durable(save)
                written = self.parts.write(content, memory, order.directory, offering, pinned)
                save.transfer = written.transfer
        except BaseException as failure:  # noqa: BLE001 -- raised when the others know
            return _Own({"error": _shown(failure)}, failure)
        return _Own({"checksum": written.checksum}, None, written.file)

    def _discard(self, order: Order, failure: BaseException) -> None:
        directory = order.directory if is_s3(order.directory) else Path(order.directory)
        try:
            self.parts.discard(directory)
        except TransferError as error:
            failure.add_note(f"{directory}: what was written could not be removed ({error})")


class _Own(NamedTuple):
    """The vote of this rank, why it failed, and the file that it has written otherwise."""

    vote: dict[str, str]
    failure: BaseException | None
    file: FileImage | None = None

    def written(self) -> FileImage:
        """Return the file of a rank that voted for the checkpoint."""
        assert self.file is not None
        return self.file


class _VoteError(Exception):
    """Ranks voted against a commit; `failed` maps them to their errors."""

    def __init__(self, failed: dict[str, str]) -> None:
        super().__init__(failed)
        self.failed = failed


def _commit_phase(step: int) -> str:
    return f"commit of step {step}"


def _shown(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"
