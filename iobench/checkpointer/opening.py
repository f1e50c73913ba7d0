"""Opening: checks the options of a Checkpointer, takes its location, and makes its parts."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from iobench.checkpoint.commit import Committer
from iobench.checkpoint.content import Contents
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.persister import Persister, Snapshot, newest
from iobench.checkpoint.place import LocalPlace, Place, SaveParticipant
from iobench.checkpoint.ranked.dcp_files import DcpFormat
from iobench.checkpoint.ranked.messages import Committed, Turns
from iobench.checkpoint.ranked.plan import CutPlanner, Planning
from iobench.checkpoint.retention import KeepAll, Retention
from iobench.checkpoint.save import OnEvent, Save
from iobench.checkpoint.schedule import Schedule
from iobench.checkpoint.serialized import SafetensorsFormat, Serializer
from iobench.checkpoint.slots import SlotPool
from iobench.checkpoint.store import CheckpointStore, store_at
from iobench.checkpointer.restoring import Restoring
from iobench.errors import OptionError, UsageError
from iobench.ranks.control import Control
from iobench.ranks.world import AnyWorld, World
from iobench.remote.local_tier import KeepUntilCopied, LocalTier, Placing
from iobench.remote.placement import Placement
from iobench.remote.remote import AnyTier, GivenTiers
from iobench.remote.snapshot_memory import SnapshotMemory
from iobench.replicas.partner import Partner
from iobench.replicas.replicator import Replicator
from iobench.units import parse_size
from iobench.writers.base import Writer
from iobench.writers.config import writer_of
from iobench.writers.s3_store.target import is_s3

WhenFull = Literal["wait", "skip", "drop", "raise"]
"""What a save does without a free slot. "raise" waits, and raises if the budget is too small."""

_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "location": ((str, Path), '"runs/a"'),
    "writer": ((str, Writer), '"hybrid"'),
    "keep": ((Retention, NoneType), "KeepLast(3)"),
    "schedule": ((Schedule, NoneType), "Every(500)"),
    "budget": ((int, str, NoneType), '"16GiB"'),
    "bandwidth_limit": ((int, str, NoneType), '"500MiB"'),
    "lazy": ((bool,), "True"),
    "placement": ((Placement, NoneType), "Placement()"),
    "replicate": ((Partner, NoneType), "iobench.Partner()"),
}
"""Types of options, and an example. A bool is not a number here."""


@dataclass(frozen=True, kw_only=True)
class CheckpointerOptions:
    """See Checkpointer. Raises OptionError and UsageError before anything is opened."""

    location: str | Path
    writer: Writer | str
    slots: int | None
    on_full: WhenFull
    keep: Retention | None
    schedule: Schedule | None
    budget: int | str | None
    bandwidth_limit: int | str | None
    lazy: bool
    on_event: OnEvent | None
    tiers: Sequence[AnyTier]
    placement: Placement | None
    offload: Any
    world: AnyWorld
    replicate: Partner | None
    writers_per_node: int | None
    deadline_s: float

    def __post_init__(self) -> None:
        many, slots, ranked = self.writers_per_node, self.slots, self.own_world.size > 1
        self.participant.check(
            keep=self.keep,
            placed=self.placement is not None,
            tiers=self.tiers,
            world=self.own_world,
        )
        self.given.check(self.__dict__, ranked=ranked)
        if self.in_order and self.on_full == "drop":
            raise OptionError("every_save: on_full='drop' drops saves; use 'wait'")
        if many is not None and not (type(many) is int and many > 0):
            raise OptionError(f"writers_per_node={many!r}: 1 or more, or None for all")
        if type(self.deadline_s) not in (int, float) or not self.deadline_s > 0:
            raise OptionError(f"deadline_s={self.deadline_s!r}: seconds, above 0")
        if slots is not None and (type(slots) is not int or slots < 1):
            raise OptionError(f"slots={slots!r}: a whole number, 1 or more")
        if self.on_full not in get_args(WhenFull):
            raise OptionError(f"on_full={self.on_full!r}: 'wait', 'skip', 'drop' or 'raise'")
        for name, (classes, example) in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, classes) or (isinstance(value, bool) and bool not in classes):
                raise OptionError(f"{name}={value!r}: takes a value such as {example}")
        if self.placement is not None and self.given.remote is None:
            raise OptionError("placement: needs tiers=[Remote(...)]")
        if self.on_event is not None and not callable(self.on_event):
            raise OptionError(
                f"on_event={self.on_event!r}: takes a function of a Save and an event"
            )
        if self.rate_bytes_per_s == 0:
            raise OptionError("bandwidth_limit=0: must be at least 1 byte per second")
        if not self.own_writer.stores:
            name = self.own_writer.name
            raise UsageError(f"writer {name!r} stores nothing; choose another writer")
        if self.replicate is not None and not ranked:
            warnings.warn(
                "replicate: this job has one rank, so nothing is replicated",
                RuntimeWarning,
                stacklevel=5,
            )

    @functools.cached_property
    def own_world(self) -> World:
        """The ranks that save together."""
        return World.of(self.world)

    @functools.cached_property
    def own_writer(self) -> Writer:
        """The writer of the location."""
        return writer_of(self.writer)

    @functools.cached_property
    def given(self) -> GivenTiers:
        """The tiers by kind."""
        return GivenTiers.of(self.tiers or ())

    @functools.cached_property
    def participant(self) -> SaveParticipant:
        """What takes part in the saves."""
        if self.offload is None:
            return SaveParticipant()
        found = getattr(self.offload, "save_participant", None)
        if found is None:
            raise OptionError(
                f"offload={self.offload!r:.80}: takes an optimizer of iobench.offload"
            )
        participant: SaveParticipant = found()
        return participant

    @property
    def in_order(self) -> bool:
        """Whether every snapshot is written, the oldest first."""
        return self.given.remote is not None and self.given.remote.every_save

    @property
    def rate_bytes_per_s(self) -> int | None:
        """What background saves may write."""
        limit = self.bandwidth_limit
        return None if limit is None else parse_size(limit)

    def pool(self) -> SlotPool:
        """Return the slots of the snapshots."""
        ranked = self.own_world.size > 1
        return SlotPool(
            2 if self.slots is None else self.slots,
            None if self.budget is None else parse_size(self.budget),
            streams=self.on_full != "raise",
            whole=ranked and self.replicate is not None,  # replicas are sent from memory
            alone=not ranked,
        )


class Opening:
    """The parts of a Checkpointer; `ledger` is that of rank 0.

    The constructor takes the location together with the other ranks, and makes the parts that save
    there. What fails leaves nothing open.
    """

    def __init__(self, options: CheckpointerOptions, ranks: Control) -> None:
        self.options, self.ranks = options, ranks
        self.tier: LocalTier | None = None
        self.ledger: Ledger | None = None
        self.memory: SnapshotMemory | None = None
        self.replicator: Replicator | None = None
        self.contents: Contents = Serializer()
        location, given, writer = options.location, options.given, options.own_writer
        self.store = self._store_at(location)
        self.restoring = Restoring(
            ranks=ranks,
            store=self.store,
            writer=writer,
            tier=self.tier,
            participant=options.participant,
        )
        users = options.keep or KeepAll()
        keep = users if self.tier is None else users | KeepUntilCopied(self.tier)
        try:
            if given.memories:
                snapshots = partial(SnapshotMemory, given.memories, ranks.world)
                self.memory, _ = ranks.together("memory tiers", snapshots, lambda _: None)
                self.restoring.memory = self.memory
            ranks.agreed(f"opening {location}", partial(self._lead, keep))
            if ranks.many:
                ranks.agreed(f"looking at {location}", lambda: writer.require(location))
            if options.replicate is not None and ranks.many:
                self.replicator = Replicator(options.replicate, ranks, str(self.store))
                self.restoring.replicator = self.replicator
            self.committer = self._new_committer()
            self.persister = self._new_persister(users)
        except BaseException:
            if self.replicator is not None:
                self.replicator.close(finished=False)
            if self.memory is not None:
                self.memory.pool.free()
            self.store.release()
            raise

    def _store_at(self, location: str | Path) -> CheckpointStore:
        remote = self.options.given.remote
        if remote is None:
            return store_at(location, self.options.own_writer)
        self.options.own_writer.check_scheme(location)
        if is_s3(location):
            raise OptionError(f"{location}: with tiers, checkpoints are saved to a directory first")
        self.tier = LocalTier(Path(location), remote, self.ranks)
        return self.tier

    def _lead(self, keep: Retention) -> None:
        """Take the location for all ranks, in rank 0."""
        self.options.participant.open(self.store, None if self.tier is None else self.tier.drain)
        if not self.ranks.leads:
            return
        self.store.acquire()
        self.options.own_writer.require(self.options.location)
        self.store.clean()
        self.ledger = self.restoring.ledger = Ledger(self.store, keep)
        self.restoring.begin()

    def _new_committer(self) -> Committer:
        """Return what commits checkpoints."""
        ranks = self.ranks
        form: Any = SafetensorsFormat(participant=self.options.participant)
        if ranks.many:
            planner = partial(
                CutPlanner,
                nodes=ranks.nodes,
                writers_per_node=self.options.writers_per_node,
            )
            self.contents = Planning(ranks, planner)
            form = DcpFormat(world=ranks.world, hosts=ranks.hosts)
        return Committer(
            control=ranks.sub("persister"),
            format=form,
            writer=self.options.own_writer,
            ledger=self.ledger,
            place=None if self.ledger is None else self._chooser(self.ledger),
            rate_bytes_per_s=self.options.rate_bytes_per_s,
            tier=self.tier,
            offering=None if self.replicator is None else self.replicator.offering,
            participant=self.options.participant,
        )

    def _chooser(self, ledger: Ledger) -> Callable[[Save, Any], Place]:
        """Return what chooses where a save is written, in rank 0."""
        writer, placement = self.options.own_writer, self.options.placement
        shared = self.ranks.many
        if self.tier is not None and placement is not None:
            return Placing(self.tier, writer, ledger, placement, shared).place
        local = LocalPlace(store=self.store, writer=writer, ledger=ledger, shared=shared)
        return lambda *_: local

    def _new_persister(self, keep: Retention) -> Persister:
        """Return what writes snapshots in the background. `keep` is the user's."""
        ranks, committer, turns = self.ranks, self.committer, None

        def persist(snapshot: Snapshot) -> Committed:
            memory = None if snapshot.slot is None else snapshot.memory
            return committer.commit(snapshot.save, snapshot.content, memory, limited=True)

        if ranks.many:
            turns = Turns(ranks, committer.announced)
            committer.gone = turns.newly_gone
        if self.memory is None:
            pick = None if self.options.in_order else newest
            return Persister(self.options.pool(), persist, pick=pick, turns=turns)
        return self.memory.open(
            persist,
            ledger=self.ledger,
            keep=keep,
            store=self.store,
            in_order=self.options.in_order or self.replicator is not None,
            newest_first=self.options.on_full == "drop",
            turns=turns,
        )
