"""Opening: makes the parts of a Checkpointer, and takes its location with all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iobench.checkpoint.commit import Committer
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.persister import Persister, Snapshot, newest
from iobench.checkpoint.place import LocalPlace, Place
from iobench.checkpoint.ranked.order import Committed
from iobench.checkpoint.ranked.turns import Turns
from iobench.checkpoint.retention import KeepAll, Retention
from iobench.checkpoint.safetensors_files import SafetensorsFormat
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import Serializer
from iobench.checkpoint.store import CheckpointStore, reusing_files, store_at
from iobench.checkpointer.options import CheckpointerOptions
from iobench.checkpointer.ranks import JobRanks
from iobench.checkpointer.restoring import Restoring
from iobench.checkpointer.saving import Contents
from iobench.errors import OptionError
from iobench.writers.s3_store.target import is_s3

if TYPE_CHECKING:
    from iobench.remote.given import GivenTiers
    from iobench.remote.local_tier import LocalTier
    from iobench.remote.snapshot_memory import SnapshotMemory
    from iobench.replicas.replicator import Replicator

__all__ = ["Opening"]


@dataclass
class Opening:
    """The parts of a Checkpointer, after `open`; `ledger` is that of rank 0."""

    options: CheckpointerOptions
    ranks: JobRanks
    store: CheckpointStore = field(init=False)
    tier: LocalTier | None = field(default=None, init=False)
    ledger: Ledger | None = field(default=None, init=False)
    memory: SnapshotMemory | None = field(default=None, init=False)
    replicator: Replicator | None = field(default=None, init=False)
    contents: Contents = field(init=False)
    committer: Committer[Any] = field(init=False)
    persister: Persister[Any] = field(init=False)
    restoring: Restoring = field(init=False)

    def open(self) -> None:
        """Take the location together with the other ranks, and make the parts that save there.

        What fails leaves nothing open.
        """
        options, ranks, location = self.options, self.ranks, self.options.location
        given, writer = options.given, options.own_writer
        self.store = reusing_files(self._store_at(location), options.reuse_files)
        self.restoring = Restoring(
            ranks=ranks,
            store=self.store,
            writer=writer,
            tier=self.tier,
            participant=options.participant,
        )
        keep = options.keep or KeepAll()
        users = (given.keep if given is not None else None) or keep
        keep = users if self.tier is None else self.tier.keeping(users)
        try:
            if given is not None and given.memories:
                ranks.agreed("memory tiers", partial(self._open_memory, given))
            ranks.agreed(f"opening {location}", partial(self._lead, keep))
            if ranks.many:
                ranks.agreed(f"looking at {location}", lambda: writer.require(location))
            places = ranks.agreed("hosts", lambda: [ranks.world.host, ranks.world.node])
            if options.replicate is not None and ranks.many:
                from iobench.replicas.replicator import Replicator

                self.replicator = Replicator(options.replicate, ranks.trainer, str(self.store))
                self.restoring.replicator = self.replicator
            self.committer = self._new_committer(places)
            self.persister = self._new_persister(users)
        except BaseException:
            if self.memory is not None:
                self.memory.pool.close()
            self.store.release()
            raise

    def _store_at(self, location: str | Path) -> CheckpointStore:
        remote = self.options.given.remote if self.options.given is not None else None
        if remote is None:
            return store_at(location, self.options.own_writer)
        self.options.own_writer.check_scheme(location)
        if is_s3(location):
            raise OptionError(f"{location}: with tiers, checkpoints are saved to a directory first")
        from iobench.remote.drain import ALONE, DrainRanks  # here: it takes time to import
        from iobench.remote.local_tier import LocalTier

        ranks = self.ranks
        self.tier = LocalTier(
            Path(location),
            remote,
            DrainRanks(
                thread=ranks.trainer.sub("drain", aside=True),
                trainer=ranks.trainer,
                deadline_s=ranks.deadline_s,
            )
            if ranks.many
            else ALONE,
        )
        return self.tier

    def _open_memory(self, given: GivenTiers) -> None:
        self.memory = self.restoring.memory = given.snapshot_memory(self.ranks.world)

    def _lead(self, keep: Retention) -> None:
        """Take the location for all ranks, in rank 0."""
        if not self.ranks.leads:
            return
        self.store.acquire()
        self.options.own_writer.require(self.options.location)
        self.store.clean()
        self.ledger = self.restoring.ledger = Ledger(self.store, keep)
        if self.options.participant is not None:
            drain = None if self.tier is None else self.tier.drain
            self.options.participant.open(self.store, drain)
        self.restoring.begin()

    def _new_committer(self, places: list[Any]) -> Committer[Any]:
        """Return what commits checkpoints; `places` are the hosts and nodes of the ranks."""
        ranks, hosts = self.ranks, [host for host, _ in places]
        self.contents = Serializer()
        form: Any = SafetensorsFormat(participant=self.options.participant)
        if ranks.many:
            from iobench.checkpoint.ranked.dcp_files import DcpFormat
            from iobench.checkpoint.ranked.planning import Planning
            from iobench.checkpoint.ranked.slice_planner import SlicePlanner

            planner = partial(
                SlicePlanner,
                nodes=[node for _, node in places],
                writers_per_node=self.options.writers_per_node,
            )
            self.contents = Planning(ranks.trainer, planner, deadline_s=ranks.deadline_s)
            form = DcpFormat(world=ranks.world, hosts=hosts)
        return Committer(
            control=ranks.background,
            format=form,
            writer=self.options.own_writer,
            ledger=self.ledger,
            place=None if self.ledger is None else self._chooser(self.ledger),
            rate_bytes_per_s=self.options.rate_bytes_per_s,
            deadline_s=ranks.deadline_s,
            hosts=hosts,
            tier=self.tier,
            offering=None if self.replicator is None else self.replicator.offering,
            participant=self.options.participant,
        )

    def _chooser(self, ledger: Ledger) -> Callable[[Save, Any], Place]:
        """Return what chooses where a save is written, in rank 0."""
        writer, placement = self.options.own_writer, self.options.placement
        shared = self.ranks.many
        if self.tier is not None and placement is not None:
            from iobench.remote.placing import Placing

            return Placing(self.tier, writer, ledger, placement, shared).place
        local = LocalPlace(store=self.store, writer=writer, ledger=ledger, shared=shared)
        return lambda *_: local

    def _new_persister(self, keep: Retention) -> Persister[Any]:
        """Return what writes snapshots in the background. `keep` is the user's."""
        ranks, committer, turns = self.ranks, self.committer, None

        def persist(snapshot: Snapshot[Any]) -> Committed:
            memory = None if snapshot.slot is None else snapshot.memory
            return committer.commit(snapshot.save, snapshot.content, memory, limited=True)

        if ranks.many:
            turns = Turns(ranks.trainer, committer.announced, deadline_s=ranks.deadline_s)
            committer.gone = turns.newly_gone
        if self.memory is None:
            pick = None if self.options.in_order else newest
            return Persister(self.options.pool(), persist, pick=pick, turns=turns)
        return self.memory.open(
            persist,
            ledger=self.ledger,
            keep=keep,
            store=self.store,
            local=self.tier,
            stored=None if self.tier is None else self.tier.copies,
            in_order=self.options.in_order or self.replicator is not None,
            turns=turns,
        )
