"""Committer: the ranks of a job write one checkpoint together, in two phases.

    rank 0                                  each rank
    makes step-N's hidden directory
    announces it                      ->    writes its files, synced
    collects the votes                <-    votes
    writes the manifest, renames
    announces the commit              ->    knows that the checkpoint is durable

One process is a job of one rank: its calls to the other ranks return at once. What the files are is
the business of a `Format`, and where they go that of a `Place`.

A rank that fails votes so, and nothing becomes visible. The hidden directory has a random name, so
a rank of an earlier start of the job cannot write into it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from iobench.checkpoint.content import Content
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.place import (
    Format,
    PartOffer,
    PartTarget,
    Place,
    SaveJob,
    SaveParticipant,
    Tier,
    Written,
)
from iobench.checkpoint.ranked.messages import Committed, Ending, Order, VoteError, shown
from iobench.checkpoint.save import Save
from iobench.errors import IobenchError, RankError, StateError, TransferError
from iobench.ranks.control import Control
from iobench.writers.base import Writer
from iobench.writers.image import Bytes
from iobench.writers.s3_store.target import is_s3

_NEXT = "next checkpoint"
_BEGIN = "the begin of a save"


class _Own(NamedTuple):
    """The vote of this rank, why it failed, and what it has written otherwise."""

    vote: dict[str, Any]
    failure: BaseException | None
    written: Written | None = None


@dataclass(kw_only=True)
class Committer:
    """Commits checkpoints of all ranks of `control` through `writer`.

    `ledger` and `place` are those of rank 0; `place` chooses where a save goes. Background saves
    write no faster than `rate_bytes_per_s`.
    """

    control: Control
    format: Format
    writer: Writer
    ledger: Ledger | None
    place: Callable[[Save, Content], Place] | None
    rate_bytes_per_s: int | None = None
    tier: Tier | None = None
    offering: Callable[[Order, Save], AbstractContextManager[PartOffer]] | None = None
    participant: SaveParticipant
    gone: Callable[[], list[int]] = list
    """Returns the numbers of dropped saves that were not announced yet, in rank 0."""
    _order: Order | None = field(default=None, init=False)

    def commit(
        self, save: Save, content: Content, memory: Bytes | None = None, *, limited: bool = False
    ) -> Committed:
        """Write the checkpoint with the other ranks. On return it is durable and visible.

        Every rank calls it. The tensors are in `memory`, or else in the trainer's own. A save that
        has failed in this rank, see its `error`, takes part in order to tell the others. `limited`:
        by `rate_bytes_per_s`.

        Raises RankError, with the name of the rank that failed, and in a job of one rank its own
        error: TransferError, also if the writer reports that its files are not durable, and other
        errors of the writer. Then no part of the checkpoint is visible, and a checkpoint of the
        same step stays. When an older checkpoint cannot be removed after the commit, a
        RuntimeWarning says so.
        """
        target = PartTarget(
            directory="",
            writer=self.writer,
            rate_bytes_per_s=self.rate_bytes_per_s if limited else None,
        )
        job = SaveJob(save, content, memory, target)
        try:
            committed = self._follow(job) if self.ledger is None else self._lead(self.ledger, job)
        finally:
            self.participant.ended(save)
        save.status = "committed"
        return committed

    def announced(self) -> Order:
        """Wait until rank 0 has announced its next save. For the other ranks; it begins nothing."""
        if self._order is None:
            found = self.control.broadcast(_NEXT)
            self._order = Order(*found)
        return self._order

    def _lead(self, ledger: Ledger, job: SaveJob) -> Committed:
        save, content = job.save, job.content
        order = Order(content.number, save.step)
        try:
            self._check(save)
            if save.error is None:  # an interrupted save may be complete
                save.status = "writing"
            order = order._replace(serial=ledger.serial_of(save))
            assert self.place is not None
            place: Place | None = self.place(save, content)
        except BaseException as failure:
            self._conclude(order, failure)
            raise
        committed: Committed | None = None
        while place is not None:
            committed, place = self._attempt(place, job, order)
        assert committed is not None
        return committed

    def _check(self, save: Save) -> None:
        """Raise the error of a save that has failed in this rank, so that the others know of it.

        In a job of one rank such a save comes here only if it failed after its copy was complete.
        """
        if save.error is not None and self.control.world.size > 1:
            raise save.error

    def _attempt(
        self, place: Place, job: SaveJob, order: Order
    ) -> tuple[Committed | None, Place | None]:
        """Write the checkpoint at `place`. Return what this rank wrote, or the next place."""
        save = job.save
        try:
            with place.staged(save, order.serial) as staged:
                order = order._replace(
                    directory=os.fspath(staged.directory),
                    remote=place.remote,
                    limit_s=place.limit_s,
                )
                self._announce(order)
                own = self._part(job, order)
                votes = self._votes(own, order)
                assert own.written is not None
                made = partial(self._manifest, save, order, place)
                manifest = self.format.publish(job, own.written, staged, votes, made, place)
                save.status = "committed"
                place.committed(save, manifest)
            probe = 0 if job.memory is None else place.probe_bytes(self.control.world.size)
        except RankError:  # of a call: every rank knows
            raise
        except BaseException as failure:
            # What was written is removed by now: the others see to what is left on their nodes.
            if save.status == "committed":
                self._conclude(order, None)
                raise
            instead = place.instead(save, failure)
            if instead is not None:
                if order.directory:
                    self._end(order, Ending(_failed(failure), again=True))
                return None, instead
            self._conclude(order, failure)
            raise
        self._end(order, Ending(probe=probe))
        if probe:
            self._probe(probe, job)
        alone = self.control.world.size == 1
        return Committed(order.serial, own.written.file, manifest if alone else None), None

    def _manifest(self, save: Save, order: Order, place: Place, **more: Any) -> Manifest:
        """Return the manifest, with what the format gives in `more`."""
        from iobench._version import __version__

        writer = {"name": place.writer.name, "options": place.writer.options.to_dict()}
        size = self.control.world.size
        return Manifest(
            step=save.step,
            created_s=save.created_s,
            world_size=size,
            iobench=__version__,
            writer={**writer, "placement": place.decision} if place.decision else writer,
            serial=order.serial,
            attempt=order.attempt if size > 1 else "",
            **more,
        )

    def _announce(self, order: Order) -> None:
        self.control.broadcast(_NEXT, order._replace(gone=self.gone()))

    def _end(self, order: Order, ending: Ending) -> None:
        self.control.broadcast(_commit_phase(order.step), ending)

    def _conclude(self, order: Order, failure: BaseException | None) -> None:
        """Tell the others how the save ended; raise what they raise.

        A save without a directory was not announced yet.
        """
        if self.control.world.size == 1:
            return
        failed = _failed(failure)
        if not order.directory:
            self._announce(order._replace(failed=failed))
            raise self._error(_BEGIN, failed) from failure
        self._end(order, Ending(failed))
        if isinstance(failure, Exception):
            raise self._error(_commit_phase(order.step), failed) from failure

    def _probe(self, share: int, job: SaveJob) -> None:
        """Measure the local tier: every rank writes a part of its snapshot there, and removes it.

        The time is that of the slowest rank.
        """
        assert self.tier is not None
        began_s = time.monotonic()
        # A rank without a snapshot, because of its budget, writes nothing.
        part, failed = np.empty(0, dtype=np.uint8) if job.memory is None else job.memory[:share], ""
        try:
            self.tier.probe(job.target, part)
        except IobenchError as error:
            failed = shown(error)
        every = self.control.gather("probe", [len(part), failed])
        if self.ledger is not None:
            ok = not any(wrong for _, wrong in every)
            size = sum(count for count, _ in every)
            self.tier.probed(size, time.monotonic() - began_s, ok=ok)

    def _error(self, phase: str, failed: Mapping[str, str]) -> RankError:
        """Return the error of a save that failed in these ranks."""
        ranks = sorted(map(int, failed))
        texts = [
            f"rank {one} (host {self.control.hosts[one]}), {phase}: {failed[str(one)]}"
            for one in ranks
        ]
        return RankError("; ".join(texts), ranks=ranks)

    def _follow(self, job: SaveJob) -> Committed:
        save, order = job.save, self.announced()
        assert order.number == job.content.number  # see Turns
        self._order = None
        if order.failed:
            raise self._error(_BEGIN, order.failed)
        save.status = "writing"
        own = self._part(job, order)
        self._cast(order, own.vote)
        phase = _commit_phase(order.step)
        ending = Ending(*self.control.broadcast(phase))
        if ending.failed:
            error = self._error(phase, ending.failed)
            self._discard(order, error)
            if ending.again:
                return self._follow(job)
            raise error from own.failure
        if self.tier is not None:
            self.tier.followed(save, order.serial, direct=order.remote)
        if ending.probe:
            self._probe(ending.probe, job)
        assert own.written is not None
        return Committed(order.serial, own.written.file)

    def _votes(self, own: _Own, order: Order) -> list[str]:
        """Collect the votes, that of rank 0 too. Return the checksums of all parts.

        Raises VoteError if a rank failed, and in a job of one rank why.
        """
        votes = self._cast(order, own.vote)
        alone = self.control.world.size == 1
        if own.failure is not None and (alone or not isinstance(own.failure, Exception)):
            raise own.failure
        failed = {f"{rank}": vote["error"] for rank, vote in enumerate(votes) if "error" in vote}
        of_place = all(vote["of_place"] for vote in votes if "error" in vote)
        if failed:
            raise VoteError(failed, of_place=of_place) from own.failure
        return [vote["checksum"] for vote in votes]

    def _cast(self, order: Order, vote: dict[str, Any]) -> list[dict[str, Any]]:
        """Vote. Return the votes of all ranks in rank 0."""
        phase = f"vote on step {order.step}"
        return self.control.gather(phase, vote)

    def _part(self, job: SaveJob, order: Order) -> _Own:
        """Write the files of this rank."""
        save = job.save
        waits = nullcontext() if self.tier is None else self.tier.saving()
        offering = nullcontext() if self.offering is None else self.offering(order, save)
        try:
            with waits, offering as offer:
                self._check(save)
                if save.step != order.step:
                    raise StateError(f"this rank saves step {save.step}, rank 0 step {order.step}")
                with self._target(order, job.target) as here:
                    written = self.format.write(job._replace(target=here), offer)
                save.transfer = written.transfer
                if not written.transfer.durable:
                    raise TransferError(
                        f"step {save.step}: writer {here.writer.name!r} did not make its files "
                        "durable; the checkpoint is not committed"
                    )
        except BaseException as failure:  # noqa: BLE001 -- raised when the others know
            of_place = isinstance(failure, IobenchError) and save.error is None
            return _Own({"error": shown(failure), "of_place": of_place}, failure)
        return _Own({"checksum": written.checksum}, None, written)

    @contextmanager
    def _target(self, order: Order, target: PartTarget) -> Iterator[PartTarget]:
        target = replace(target, directory=order.directory)
        if not order.remote or self.tier is None:
            yield target
            return
        limit_s = order.limit_s if self.ledger is None else None  # rank 0 is inside of its own
        with self.tier.target(target, limit_s) as there:
            yield there

    def _discard(self, order: Order, failure: BaseException) -> None:
        if is_s3(order.directory):
            return  # rank 0 removes all objects of the prefix
        try:
            self.format.discard(Path(order.directory))
        except TransferError as error:
            failure.add_note(f"{order.directory}: what was written could not be removed ({error})")


def _failed(failure: BaseException | None) -> dict[str, str]:
    """Return the errors of the ranks that failed."""
    if isinstance(failure, VoteError):
        return failure.failed
    return {} if failure is None else {"0": shown(failure)}


def _commit_phase(step: int) -> str:
    return f"commit of step {step}"
