"""Saving: what a Checkpointer does in the trainer's thread for a save, with all ranks."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from iobench.checkpoint.commit import Committer
from iobench.checkpoint.content import Contents
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.persister import Persister, Snapshot
from iobench.checkpoint.place import SaveParticipant
from iobench.checkpoint.save import Save, SaveEvents
from iobench.checkpoint.snapshot import LazyCopy, copy_into
from iobench.checkpointer.restoring import Restoring
from iobench.errors import RankError, UsageError
from iobench.ranks.control import Control
from iobench.remote.local_tier import LocalTier
from iobench.remote.snapshot_memory import SnapshotMemory
from iobench.replicas.replicator import Replicator
from iobench.writers.blocks.channel import Channel, Lease, LeaseState, OnFull

_REMEMBERED = 1000  # length of `saves`


class _Asked(NamedTuple):
    """A save that the other ranks know of, and their answer."""

    save: Save
    local: Any
    answer: Callable[[], list[Any]]


@dataclass(kw_only=True)
class Saving:
    """Takes the snapshots of all ranks. The trainer's thread and the persister's have own calls.

    `ledger` is that of rank 0.
    """

    ranks: Control
    contents: Contents
    committer: Committer
    persister: Persister
    ledger: Ledger | None
    on_full: OnFull
    lazy: bool
    restoring: Restoring
    replicator: Replicator | None = None
    events: SaveEvents | None = None
    tier: LocalTier | None = None
    memory: SnapshotMemory | None = None
    participant: SaveParticipant
    saves: deque[Save] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _copies: Channel[LazyCopy] = field(init=False)
    _lazy_save: Save | None = field(default=None, init=False)
    _asked: _Asked | None = field(default=None, init=False)
    _number: int = field(default=0, init=False)
    _pid: int = field(default_factory=os.getpid, init=False)

    def __post_init__(self) -> None:
        copies: Channel[LazyCopy] = Channel(
            lambda: copies.serve(LazyCopy.run), name="iobench-snapshot", lingers=False, daemon=False
        )
        self._copies = copies

    def prepare(self, state: Any, *, wait: bool) -> None:
        """Allocate the slots for states like `state`. See Checkpointer.prepare."""
        if not self.ranks.many:
            self.persister.raise_failure()
        local, every = self.ranks.together("plan", lambda: self.contents.local(state), self._facts)
        self._raise_failure(every)
        content = self.contents.content(-1, local, every)
        self.persister.prepare(content.size_bytes, wait=wait, pinned=not content.on_cpu)
        if wait:
            self.persister.raise_failure()

    def save_async(self, state: Any, step: int) -> Save:
        """Take a snapshot of `state`. See Checkpointer.save_async."""
        began_s = time.perf_counter()
        save = Save(step=step, status="copying", created_s=time.time())
        lease: Lease[Snapshot] | None = None
        copy: Lease[LazyCopy] | None = None
        try:
            content = self._begin_copy(state, save)
            lease = Lease(Snapshot(save=save, content=content))
            if not self.persister.take(lease, pinned=not content.on_cpu, on_full=self.on_full):
                save.status = "skipped"
            elif lease.item.begin or self.lazy:
                copy = Lease(LazyCopy(lease, self.persister, waits=not self.lazy))
                self._lazy_save = save
                self._copies.submit(copy)
                if not self.lazy:
                    self.finish_copy()
            else:
                save.pages_s = copy_into(lease.item.memory, content)
                lease.item.content = self._agreed_content(lease).without_memory()
                self.persister.submit(lease)
        except BaseException as error:
            save.fail(error)
            if copy is not None and copy.state is not LeaseState.HELD:
                if not self.lazy:
                    copy.item.stop(error)
            elif lease is not None:
                self._give_up(lease)
            raise
        save.stall_s = time.perf_counter() - began_s
        return save

    def save(self, state: Any, step: int, began_s: float) -> Save:
        """Write `state`. See Checkpointer.save."""
        save = Save(step=step, status="copying", created_s=time.time())
        try:
            content = self._settled(self._ask(state, save))
            if content.on_cpu:
                self.committer.commit(save, content)
            else:
                self._save_from_gpu(Lease(Snapshot(save=save, content=content)))
        except BaseException as error:
            save.fail(error)
            raise
        save.stall_s = time.perf_counter() - began_s
        return save

    def _begin_copy(self, state: Any, save: Save) -> Any:
        """Begin to agree. Return what this rank will write if the plan stays the same.

        The copy goes on while the other ranks answer; see `_agreed_content`.
        """
        asked = self._ask(state, save)
        ahead = None
        # Without `counts_alone` the ranks agree on the slots too.
        if self.on_full == "wait" and not self.lazy and self.persister.pool.counts_alone:
            ahead = self.contents.content_ahead(asked.local)
        if ahead is None:
            return self._settled(asked)
        save.size_bytes = ahead.size_bytes
        self._asked = asked
        return ahead

    def _ask(self, state: Any, save: Save) -> _Asked:
        """Tell the other ranks about `save`. An error here is raised in all ranks."""
        step = save.step
        self.participant.make_room(self._freeing())
        if self.tier is not None:
            save.tiers = self.tier.copies
            save.backlog_wait_s = self.tier.drain.wait_for_backlog()

        def look() -> Any:
            self.finish_copy()
            if not self.ranks.many:
                self.persister.raise_failure()
            if self.replicator is not None:
                self.replicator.warn()
            if type(step) is not int or step < 0:
                given = step if isinstance(step, int | float | str) else type(step)
                raise UsageError(f"save(state, step): step is {given!r}; give an int, 0 or more")
            local = self.contents.local(self.participant.added_to(state))
            if self.ledger is not None:
                self.restoring.settle()  # new saves count as newer than those of the remote tier
                self.ledger.claim(save)
            if self.memory is not None:
                self.memory.began(save)
            return local

        local, answer = self.ranks.begin_together(f"save of step {step}", look, self._facts)
        return _Asked(save, local, answer)

    def _facts(self, local: Any) -> dict[str, Any]:
        """Return what this rank tells the others in each save."""
        return {**self.contents.facts(local), "failed": list(self.persister.failed)}

    def _settled(self, asked: _Asked) -> Any:
        """Wait for the other ranks. Return what this rank writes; raise in all ranks alike."""
        save, every = asked.save, asked.answer()
        self._raise_failure(every)
        self._number += 1
        content = self.contents.content(self._number, asked.local, every)
        save.size_bytes = content.size_bytes
        self.saves.append(save)
        if self.events is not None:
            self.events.watch(save)
        self.participant.hold(save)
        return content

    def _agreed_content(self, lease: Lease[Snapshot]) -> Any:
        """Return what was copied, after all ranks agreed to it.

        If the state of another rank has a new structure, this rank may write other parts: they are
        copied here.
        """
        asked, self._asked = self._asked, None
        snapshot = lease.item
        if asked is not None:
            copied, snapshot.content = snapshot.content, self._settled(asked)
            if snapshot.content.plan is not copied.plan:
                self.persister.fit(lease, pinned=not copied.on_cpu)
                snapshot.save.pages_s = copy_into(snapshot.memory, snapshot.content)
        return snapshot.content

    def _give_up(self, lease: Lease[Snapshot]) -> None:
        """Return the slot of a save that failed here; it fails in all ranks."""
        asked, self._asked = self._asked, None
        save = lease.item.save
        own = save.error
        try:
            if asked is not None:
                lease.item.content = self._settled(asked)
        except Exception as error:  # noqa: BLE001 -- the caller raises the failure of this rank
            if own is not None:
                own.add_note(f"the other ranks had agreed on an error before: {error}")
        finally:
            save.error = own
            if lease.item.content.number < 0:  # all ranks know
                self.persister.give_back(lease)
            else:
                self.persister.give(lease)

    def _raise_failure(self, every: list[Any]) -> None:
        """Raise what failed in the background, in all ranks alike, if some of them know of it."""
        ranks = [rank for rank, one in enumerate(every) if one["failed"]]
        if not ranks:
            return
        self.persister.wait()  # this rank may not know yet
        self.persister.raise_failure()
        raise RankError(
            f"a save failed in the background; ranks {ranks} had not raised it yet", ranks=ranks
        )

    def _save_from_gpu(self, lease: Lease[Snapshot]) -> None:
        save, content = lease.item.save, lease.item.content
        memory = None
        try:
            try:
                self.persister.take(lease, pinned=True)
                if not lease.item.begin:  # otherwise it is written from the memory of the GPU
                    memory = lease.item.memory
                    save.pages_s = copy_into(memory, content)
            except Exception as error:
                if not self.ranks.many:
                    raise
                save.fail(error)  # the commit raises it in all ranks
            self.committer.commit(save, content, memory)
        finally:
            self.persister.give_back(lease)

    def finish_copy(self) -> None:
        """Wait until a lazy copy is complete."""
        if os.getpid() != self._pid:
            return
        began_s = time.perf_counter()
        self._copies.drain(despite_failure=True)
        if self._lazy_save:
            self._lazy_save.stall_s += time.perf_counter() - began_s
        self._lazy_save = None
        if failure := self._copies.failure:  # of the channel: a LazyCopy reports its own failure
            self._copies.failure = None
            raise failure

    def finish(self) -> None:
        """Wait until every save has ended. Raises only what no save has as its failure."""
        try:
            self.participant.settle()
        finally:
            self.finish_copy()
            self.persister.wait()

    def _freeing(self) -> Iterator[None]:
        """Free what the participant holds for checkpoints, one thing after the other."""
        assert self.ledger is not None  # ranks of a job never ask for room
        self.finish()
        yield
        self.ledger.tidy()
        yield
        while self.tier is not None and self.tier.drain.settle_one():
            self.ledger.tidy()
            yield
