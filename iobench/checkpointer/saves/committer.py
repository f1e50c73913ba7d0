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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.persister import Snapshot
from iobench.checkpoint.ranked.assembly import Assembly
from iobench.checkpoint.ranked.content import RankContent
from iobench.checkpoint.ranked.order import Committed, Ending, Order, OwnVote, VoteError, shown
from iobench.checkpoint.ranked.places import LocalPlace, SavePlace
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import CheckpointStore
from iobench.checkpointer.saves.part_writer import PartWriter
from iobench.errors import IobenchError, RankError, TransferError
from iobench.ranks.control import Control
from iobench.remote.direct_save import within_limit
from iobench.replicas.offering import Offering
from iobench.replicas.recovery import Version
from iobench.replicas.replicator import Replicator
from iobench.writers.image import Bytes
from iobench.writers.s3_store.target import is_s3

if TYPE_CHECKING:
    from iobench.checkpointer.saves.placing import Placing
    from iobench.remote.local_tier import LocalTier

__all__ = ["RankCommitter"]


_NEXT = "next checkpoint"
_BEGIN = "the begin of a save"


@dataclass(kw_only=True)
class RankCommitter:
    """Commits checkpoints of all ranks on `hosts`.

    `ledger`, `assembly` and `placing` are those of rank 0.
    """

    control: Control
    store: CheckpointStore
    parts: PartWriter
    deadline_s: float
    ledger: Ledger | None
    assembly: Assembly | None
    hosts: Sequence[str]
    replicator: Replicator | None = None
    tier: LocalTier | None = None
    placing: Placing | None = None
    gone: Callable[[], list[int]] = list
    """Returns the numbers of superseded saves that were not announced yet, in rank 0."""
    _order: Order | None = field(default=None, init=False)

    def commit(self, save: Save, content: RankContent, memory: Bytes | None = None) -> Committed:
        """Write the checkpoint with the other ranks. On return it is durable and visible.

        Every rank calls it. A save that has failed in this rank, see its `error`, takes part in
        order to tell the others. Raises RankError, with the name of the rank that failed; then
        no part of the checkpoint is visible.
        """
        if self.ledger is not None:
            committed = self._lead(self.ledger, save, content, memory)
        else:
            committed = self._follow(save, content, memory)
        save.status = "committed"
        return committed

    def persist(self, snapshot: Snapshot[RankContent]) -> Committed:
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
        order = Order(content.number, save.step, gone=self.gone())
        try:
            if save.error is not None:
                raise save.error
            serial = ledger.serial_of(save) if save.serial else ledger.new_serial()
            order = order._replace(serial=serial)
            place: SavePlace | None = self._place(ledger, save, content)
        except BaseException as failure:
            raise self._conclude(order, failure, announced=False) from failure
        committed: Committed | None = None
        while place is not None:
            committed, place = self._attempt(place, save, content, memory, order)
            order = order._replace(gone=())
        assert committed is not None
        return committed

    def _place(self, ledger: Ledger, save: Save, content: RankContent) -> SavePlace:
        if self.placing is not None:
            return self.placing.place(save, content.plan)
        assert self.assembly is not None
        return LocalPlace(store=self.store, ledger=ledger, assembly=self.assembly)

    def _attempt(
        self, place: SavePlace, save: Save, content: RankContent, memory: Bytes | None, order: Order
    ) -> tuple[Committed | None, SavePlace | None]:
        """Write the checkpoint at `place`. Return what this rank wrote, or the next place."""
        announced, own, probe = False, None, 0
        try:
            with place.staged(save, order.serial) as staged:
                order = order._replace(
                    directory=os.fspath(staged.directory),
                    remote=place.remote,
                    limit_s=place.limit_s,
                    spare="" if staged.spare is None else os.fspath(staged.spare),
                )
                announced = True
                self.control.broadcast(_NEXT, order.to_json(), deadline_s=self.deadline_s)
                own = self._part(save, content, memory, order)
                votes = self._votes(own, order)
                place.publish(save, content.plan, staged, votes, order)
                save.status = "committed"
                place.committed(save, order.serial)
            probe = 0 if memory is None else place.probe_bytes(self.control.world.size)
        except RankError:  # of a call: every rank knows
            raise
        except BaseException as failure:
            # What was written is removed by now: the others see to what is left on their nodes.
            if save.status == "committed":
                self._conclude(order, None)
                raise
            instead = place.instead(save, failure)
            if instead is not None:
                if announced:
                    self._end(order, Ending(_failed(failure), again=True))
                return None, instead
            raise self._conclude(order, failure, announced=announced) from failure
        self._end(order, Ending(probe=probe))
        if probe:
            self._probe(probe, memory, place)
        return Committed(order.serial, own.written()), None

    def _end(self, order: Order, ending: Ending) -> None:
        told = {**ending._asdict(), "failed": dict(ending.failed)}
        self.control.broadcast(_commit_phase(order.step), told, deadline_s=self.deadline_s)

    def _conclude(
        self, order: Order, failure: BaseException | None, *, announced: bool = True
    ) -> BaseException:
        """Tell the others how the save ended. Return what this rank raises."""
        failed = _failed(failure)
        if not announced:
            order = order._replace(failed=failed)
            self.control.broadcast(_NEXT, order.to_json(), deadline_s=self.deadline_s)
            return self._error(_BEGIN, failed)
        self._end(order, Ending(failed))
        if isinstance(failure, Exception) or failure is None:
            return self._error(_commit_phase(order.step), failed)
        return failure  # Ctrl-C

    def _probe(self, share: int, memory: Bytes | None, place: SavePlace | None) -> None:
        """Measure the local tier: every rank writes a part of its snapshot there, and removes it.

        The time is that of the slowest rank.
        """
        assert memory is not None  # of the same save in all ranks
        began_s = time.monotonic()
        part, failed = memory[:share], ""
        try:
            self.parts.probe(self.store, part)
        except IobenchError as error:
            failed = shown(error)
        every = self.control.gather("probe", [len(part), failed], deadline_s=self.deadline_s)
        if place is not None:
            size, wrong = sum(one[0] for one in every), [one[1] for one in every if one[1]]
            place.probed(size, time.monotonic() - began_s, ok=not wrong)

    def _error(self, phase: str, failed: Mapping[str, str]) -> RankError:
        """Return the error of a save that failed in these ranks."""
        ranks = sorted(map(int, failed))
        texts = [
            f"rank {one} (host {self.hosts[one]}), {phase}: {failed[str(one)]}" for one in ranks
        ]
        return RankError("; ".join(texts), ranks=ranks)

    def _follow(self, save: Save, content: RankContent, memory: Bytes | None) -> Committed:
        order = self.announced()
        assert order.number == content.number  # see Turns
        self._order = None
        if order.failed:
            raise self._error(_BEGIN, order.failed)
        own = self._part(save, content, memory, order)
        self._cast(order, own.vote)
        phase = _commit_phase(order.step)
        ending = Ending(**self.control.broadcast(phase, deadline_s=self.deadline_s))
        if ending.failed:
            error = self._error(phase, ending.failed)
            self._discard(order, error)
            if ending.again:
                return self._follow(save, content, memory)
            raise error from own.failure
        if self.tier is not None:
            self.tier.drain.committed(save, order.serial, direct=order.remote)
        if ending.probe:
            self._probe(ending.probe, memory, None)
        return Committed(order.serial, own.written())

    def _votes(self, own: OwnVote, order: Order) -> list[str]:
        """Collect the votes, that of rank 0 too. Return the checksums of all parts.

        Raises VoteError if a rank failed.
        """
        votes = self._cast(order, own.vote)
        failed = {f"{rank}": vote["error"] for rank, vote in enumerate(votes) if "error" in vote}
        of_place = all(vote["of_place"] for vote in votes if "error" in vote)
        if own.failure is not None and not isinstance(own.failure, Exception):
            raise own.failure
        if failed:
            raise VoteError(failed, of_place=of_place) from own.failure
        return [vote["checksum"] for vote in votes]

    def _cast(self, order: Order, vote: dict[str, Any]) -> list[dict[str, Any]]:
        """Vote. Return the votes of all ranks in rank 0."""
        phase = f"vote on step {order.step}"
        return self.control.gather(phase, vote, deadline_s=self.deadline_s)

    def _part(
        self, save: Save, content: RankContent, memory: Bytes | None, order: Order
    ) -> OwnVote:
        """Write the part of this rank."""
        save.status = "writing"
        version = Version(order.serial, order.step, order.attempt)
        waits = nullcontext() if self.tier is None else self.tier.drain.saving()
        try:
            with waits, Offering(self.replicator, version, save.created_s) as offering:
                if save.error is not None:
                    raise save.error
                if offering.wanted and self.assembly is not None:
                    offering.table = self.assembly.table(content.plan)
                with self._writer_of(order) as parts:
                    written = parts.write(content, memory, order.directory, offering, order.spare)
                save.transfer = written.transfer
        except BaseException as failure:  # noqa: BLE001 -- raised when the others know
            return OwnVote.failed(failure, before=save.error is not None)
        return OwnVote({"checksum": written.checksum}, None, written.file)

    @contextmanager
    def _writer_of(self, order: Order) -> Iterator[PartWriter]:
        if not order.remote or self.tier is None:
            yield self.parts
            return
        remote = self.tier.remote
        with remote.using() as writer, within_limit(writer, order.limit_s, order.directory):
            limit = remote.options.rate_bytes_per_s
            yield replace(self.parts, writer=writer, rate_bytes_per_s=limit)

    def _discard(self, order: Order, failure: BaseException) -> None:
        directory = order.directory if is_s3(order.directory) else Path(order.directory)
        try:
            self.parts.discard(directory)
        except TransferError as error:
            failure.add_note(f"{directory}: what was written could not be removed ({error})")


def _failed(failure: BaseException | None) -> dict[str, str]:
    """Return the errors of the ranks that failed."""
    if isinstance(failure, VoteError):
        return failure.failed
    return {} if failure is None else {"0": shown(failure)}


def _commit_phase(step: int) -> str:
    return f"commit of step {step}"
