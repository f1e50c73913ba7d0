"""RankedCheckpointer: the Checkpointer of one rank among several."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from iobench.checkpoint.checkpointer import LocalCheckpointer
from iobench.checkpoint.commit import Committer
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.persister import Persister, Snapshot, newest
from iobench.checkpoint.ranked.content import RankContent
from iobench.checkpoint.ranked.dcp_files import DcpFormat
from iobench.checkpoint.ranked.planning import Planning
from iobench.checkpoint.ranked.slice_planner import SlicePlanner
from iobench.checkpoint.ranked.structure import LocalState
from iobench.checkpoint.ranked.turns import Turns
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import Save
from iobench.checkpoint.schedule import Every
from iobench.checkpoint.slots import SlotPool
from iobench.checkpoint.snapshot import copy_into
from iobench.checkpointer.ranked_reads import RankedReads
from iobench.errors import OptionError, RankError, UsageError
from iobench.ranks.control import Control, shared_control
from iobench.ranks.together import begin_together
from iobench.ranks.world import World
from iobench.replicas.replicator import Replicator
from iobench.writers.blocks.channel import Lease
from iobench.writers.s3_store.target import is_s3

if TYPE_CHECKING:
    from iobench.remote.given import GivenTiers

__all__ = ["RankedCheckpointer"]


class Asked(NamedTuple):
    """A save that the other ranks were told about, and their answer."""

    save: Save
    local: LocalState
    answer: Callable[[], list[Any]]


_made: weakref.WeakKeyDictionary[Control, int] = weakref.WeakKeyDictionary()


class RankedCheckpointer(RankedReads):
    """What `iobench.Checkpointer` is in a job of several ranks; see there.

    Rank 0 has the lock of the directory and the list of checkpoints, and decides. The others
    follow. The trainer's thread and the persister's thread each have calls of their own.
    """

    _ranked = True
    _asked: Asked | None = None
    _persister: Persister[RankContent]
    _ledger: Ledger

    def _set_up(self, location: str | Path, **options: Any) -> None:
        self._world = World.of(options["world"])
        if options.get("offload") is not None:  # an error here does not wait for the other ranks
            raise OptionError(
                f"offload: for one process; this job has {self._world.size} ranks. Give each rank "
                "an optimizer and a Checkpointer in directories of its own, with world='alone'"
            )
        if options.get("tiers"):  # an error here does not wait for the other ranks
            from iobench.remote.given import GivenTiers

            GivenTiers.of(options["tiers"]).check(location, options, ranked=True)
        shared = shared_control(self._world, None if is_s3(location) else Path(location))
        self._world = shared.world
        # All ranks make their Checkpointers in the same order.
        number = _made[shared] = _made.get(shared, 0) + 1
        control = shared.sub(f"checkpointer {number}")
        self._control, self._background = control.sub("trainer"), control.sub("persister")
        self._number = 0
        super()._set_up(location, **options)

    def _open(
        self, location: str | Path, keep: Retention, pool: SlotPool, limit: int | None
    ) -> None:
        leads = self._world.rank == 0
        users = (self._given.keep if self._given is not None else None) or keep
        keep = self._kept(users)
        try:
            if self._given is not None and self._given.memories:
                self._agreed("memory tiers", partial(self._open_memory, self._given))
            self._agreed(f"opening {location}", lambda: self._lead(location, keep))
            self._agreed(f"looking at {location}", lambda: self._writer.require(location))
            places = self._agreed("hosts", lambda: [self._world.host, self._world.node])
            if self._replicate is not None:
                self._replicator = Replicator(self._replicate, self._control, str(self._store))
        except BaseException:
            if self._memory is not None:
                self._memory.pool.close()
            self._store.release()
            raise
        planner = partial(
            SlicePlanner,
            nodes=[node for _, node in places],
            writers_per_node=self._writers_per_node,
        )
        self._planning = Planning(self._control, planner, deadline_s=self._deadline_s)
        hosts = [host for host, _ in places]
        committer = self._committer = Committer(
            control=self._background,
            format=DcpFormat(world=self._world, hosts=hosts),
            writer=self._writer,
            ledger=self._ledger if leads else None,
            place=self._chooser() if leads else None,
            rate_bytes_per_s=limit,
            deadline_s=self._deadline_s,
            hosts=hosts,
            tier=self._tier,
            offering=None if self._replicator is None else self._replicator.offering,
        )
        self._persister = self._new_persister(pool, committer, users)

    def _open_memory(self, given: GivenTiers) -> None:
        self._memory = given.snapshot_memory(self._world)

    def _new_persister(
        self, pool: SlotPool, committer: Committer[RankContent], keep: Retention
    ) -> Persister[RankContent]:
        """Return what writes snapshots in the background. `keep` is the user's."""
        turns = Turns(self._control, committer.announced, deadline_s=self._deadline_s)
        committer.gone = turns.newly_gone
        if self._memory is None:
            pick = None if self._in_order else newest
            return Persister(pool, committer.persist, pick=pick, turns=turns)
        return self._memory.open(
            committer.persist,
            ledger=self._ledger if turns.leads else None,
            keep=keep,
            store=self._store,
            local=self._tier,
            stored=None if self._tier is None else self._tier.copies,
            in_order=self._in_order or self._replicator is not None,
            turns=turns,
        )

    def _lead(self, location: str | Path, keep: Retention) -> None:
        """Take the location for all ranks, in rank 0."""
        if self._world.rank == 0:
            self._store.acquire()
            self._writer.require(location)
            self._store.clean()
            self._ledger = Ledger(self._store, keep)
            self._ask_remote()

    def due(self, step: int) -> bool:
        """Return whether to save after `step`, by the schedule of rank 0."""
        if self._schedule is None or type(self._schedule) is Every:  # it depends on the steps alone
            return super().due(step)
        own = super().due(step)
        found: bool = self._control.broadcast("due", own, deadline_s=self._deadline_s)
        return found

    def _content_of(self, state: Any) -> RankContent:
        local, every = self._together("plan", lambda: self._planning.local(state), self._told)
        self._raise_failure([rank for rank, one in enumerate(every) if one["failed"]])
        return self._planning.content(-1, local, every)

    def _begin(self, state: Any, step: int) -> tuple[RankContent, Save]:
        """Agree with the other ranks about the save of `step`; copy nothing."""
        asked = self._ask(state, step)
        return self._settled(asked), asked.save

    def _begin_copy(self, state: Any, step: int) -> tuple[RankContent, Save]:
        """Begin to agree. Return what this rank will write if the plan stays the same.

        The copy goes on while the other ranks answer; see `_agreed_content`.
        """
        asked = self._ask(state, step)
        ahead = None
        if self._on_full == "wait" and not self._lazy and self._memory is None:
            ahead = self._planning.content_ahead(asked.local)
        if ahead is None:
            return self._settled(asked), asked.save
        asked.save.size_bytes = ahead.size_bytes
        self._asked = asked
        return ahead, asked.save

    def _ask(self, state: Any, step: int) -> Asked:
        """Tell the other ranks about the save of `step`. An error here is raised in all ranks."""
        self._check_usable()
        save = Save(step=step, status="copying", created_s=time.time())
        if self._tier is not None:
            save.tiers = self._tier.copies
            save.lag_wait_s = self._tier.drain.wait_for_lag(step)

        def look() -> LocalState:
            self._finish_copy()
            self._warn_of_replicas()
            if type(step) is not int or step < 0:
                raise UsageError(f"step {step!r}: a whole number, 0 or more")
            local = self._planning.local(state)
            if self._world.rank == 0:
                self._settle_opening()
                self._ledger.claim(save)
            if self._memory is not None:
                self._memory.began(save)
            return local

        phase = f"save of step {step}"
        try:
            local, answer = begin_together(
                self._control, phase, look, self._told, deadline_s=self._deadline_s
            )
        except BaseException as error:
            save.fail(error)
            raise
        return Asked(save, local, answer)

    def _told(self, local: LocalState) -> dict[str, Any]:
        """Return what this rank tells the others in each save."""
        return {**local.told(), "failed": list(self._persister.failed)}

    def _settled(self, asked: Asked) -> RankContent:
        """Wait for the other ranks. Return what this rank writes; raise in all ranks alike."""
        save = asked.save
        try:
            every = asked.answer()
            self._raise_failure([rank for rank, one in enumerate(every) if one["failed"]])
            self._number += 1
            content = self._planning.content(self._number, asked.local, every)
        except BaseException as error:
            save.fail(error)
            raise
        save.size_bytes = content.size_bytes
        self._add(save)
        return content

    def _agreed_content(self, lease: Lease[Snapshot[RankContent]]) -> RankContent:
        """Return what was copied, after all ranks agreed to it.

        If the state of another rank has a new structure, this rank may write other parts: they are
        copied here.
        """
        asked, self._asked = self._asked, None
        snapshot = lease.item
        if asked is not None:
            copied, snapshot.content = snapshot.content, self._settled(asked)
            if snapshot.content.plan is not copied.plan:
                self._persister.fit(lease, pinned=not copied.on_cpu)
                snapshot.save.pages_s = copy_into(snapshot.memory, snapshot.content)
        return snapshot.content

    def _give_up(self, lease: Lease[Snapshot[RankContent]]) -> None:
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
                self._persister.give_back(lease)
            else:
                self._persister.give(lease)

    def _raise_failure(self, ranks: list[int]) -> None:
        """Raise what failed in the background, in all ranks alike, if some `ranks` know of it."""
        if not ranks:
            return
        self._persister.wait()  # this rank may not know yet
        self._persister.raise_failure()
        raise RankError(
            f"a save failed in the background; ranks {ranks} had not raised it yet", ranks=ranks
        )

    def _save_from_gpu(self, lease: Lease[Snapshot[Any]]) -> None:
        save, content = lease.item.save, lease.item.content
        memory = None
        try:
            try:
                self._persister.take(lease, pinned=True)
                memory = lease.item.memory
                save.pages_s = copy_into(memory, content)
            except Exception as error:  # noqa: BLE001 -- the commit raises it in all ranks
                save.fail(error)
            self._committer.commit(save, content, memory)
        finally:
            self._persister.give_back(lease)

    def _warn_of_replicas(self) -> None:
        if self._replicator is not None:
            self._replicator.warn()

    def wait(self, until: Literal["committed", "remote"] = "committed") -> None:
        """Wait until every save is committed, superseded or failed. Raise what failed.

        Replicas may still be on their way. With `until="remote"` it is a call of all ranks.
        """
        super().wait(until)
        self._warn_of_replicas()

    def remove(self, step: int) -> None:
        """Remove the checkpoint `step`, in all ranks together. UsageError if there is none."""
        self._check_usable()
        self._finish_copy()
        self._persister.wait()

        def remove() -> None:
            if self._memory is not None:
                self._memory.forget(step)
            if self._world.rank == 0:
                self._remove(step)

        self._agreed(f"remove of step {step}", remove)

    def close(self) -> None:
        """Wait for every save and for all ranks, release the lock, and raise the first error."""
        if not self._unclosed.alive or os.getpid() != self._pid:
            return
        self._finish_copy()
        self._persister.wait()
        failures: list[Exception] = []
        together = True
        try:
            if self._tier is not None:
                self._tier.drain.finish()
        except Exception as error:  # noqa: BLE001 -- raised below; a filter may raise a warning
            failures.append(error)
        try:
            self._control.barrier("close", deadline_s=self._deadline_s)
        except RankError as error:
            failures.append(error)
            together = False
        try:
            if self._replicator is not None:
                self._replicator.close(finished=together)
        finally:
            LocalCheckpointer.close(self)
        if failures:
            raise failures[0]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._unclosed.alive and os.getpid() == self._pid:
            # The other ranks may wait for this one elsewhere, and never come to `close`.
            self._finish_copy()
            self._persister.wait()
            self._control.fail(error)
        super().__exit__(kind, error, trace)
