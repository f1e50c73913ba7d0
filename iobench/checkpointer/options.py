"""CheckpointerOptions: the options of a Checkpointer, checked, and what they stand for."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args

from iobench.checkpoint.events import OnEvent
from iobench.checkpoint.participant import SaveParticipant
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.schedule import Schedule
from iobench.checkpoint.slots import SlotPool
from iobench.errors import OptionError, UsageError
from iobench.ranks.world import AnyWorld, World
from iobench.replicas.partner import Partner
from iobench.units import parse_size
from iobench.writers.base import Writer
from iobench.writers.config import load_writer

if TYPE_CHECKING:
    from iobench.remote.given import AnyTier, GivenTiers
    from iobench.remote.placement import Placement

__all__ = ["CheckpointerOptions", "WhenFull"]

WhenFull = Literal["wait", "skip", "supersede", "raise"]
"""What a save does without a free slot. "raise" waits, and raises if the budget is too small."""

_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "location": ((str, Path), '"runs/a"'),
    "writer": ((str, Writer), '"hybrid"'),
    "keep": ((Retention, NoneType), "KeepLast(3)"),
    "schedule": ((Schedule, NoneType), "Every(500)"),
    "budget": ((int, str, NoneType), '"16GiB"'),
    "bandwidth_limit": ((int, str, NoneType), '"500MiB"'),
    "lazy": ((bool,), "True"),
    "reuse_files": ((bool,), "True"),
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
    reuse_files: bool
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
        if self.offload is not None and ranked:
            raise OptionError(
                f"offload: for one process; this job has {self.own_world.size} ranks. Give each "
                "rank an optimizer and a Checkpointer in directories of its own, with world='alone'"
            )
        if self.participant is not None:
            placed = self.placement is not None
            self.participant.check(keep=self.keep, placed=placed, tiers=self.tiers)
        if self.given is not None:
            self.given.check(self.location, self.__dict__, ranked=ranked)
        if self.placement is not None:
            self._check_placement(self.placement)
        if self.in_order and self.on_full == "supersede":
            raise OptionError("every_save: on_full='supersede' drops saves; use 'wait'")
        if many is not None and not (type(many) is int and many > 0):
            raise OptionError(f"writers_per_node={many!r}: 1 or more, or None for all")
        if type(self.deadline_s) not in (int, float) or not self.deadline_s > 0:
            raise OptionError(f"deadline_s={self.deadline_s!r}: seconds, above 0")
        if slots is not None and (type(slots) is not int or slots < 1):
            raise OptionError(f"slots={slots!r}: a whole number, 1 or more")
        if self.on_full not in get_args(WhenFull):
            raise OptionError(f"on_full={self.on_full!r}: 'wait', 'skip', 'supersede' or 'raise'")
        for name, (classes, example) in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, classes) or (isinstance(value, bool) and bool not in classes):
                raise OptionError(f"{name}={value!r}: takes a value such as {example}")
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

    def _check_placement(self, placement: object) -> None:
        from iobench.remote.placement import Placement  # here: it takes time to import

        if not isinstance(placement, Placement):
            raise OptionError(f"placement={placement!r}: takes a value such as Placement()")
        if self.given is None or self.given.remote is None:
            raise OptionError("placement: needs tiers=[Remote(...)]")

    @functools.cached_property
    def own_world(self) -> World:
        """The ranks that save together."""
        return World.of(self.world)

    @functools.cached_property
    def own_writer(self) -> Writer:
        """The writer of the location."""
        return load_writer(self.writer) if isinstance(self.writer, str) else self.writer

    @functools.cached_property
    def given(self) -> GivenTiers | None:
        """The tiers by kind."""
        if not self.tiers:
            return None
        from iobench.remote.given import GivenTiers  # here: it takes time to import

        return GivenTiers.of(self.tiers)

    @functools.cached_property
    def participant(self) -> SaveParticipant | None:
        """What takes part in the saves."""
        if self.offload is None:
            return None
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
        remote = None if self.given is None else self.given.remote
        return remote is not None and remote.every_save

    @property
    def rate_bytes_per_s(self) -> int | None:
        """What background saves may write."""
        limit = self.bandwidth_limit
        return None if limit is None else parse_size(limit)

    def pool(self) -> SlotPool:
        """Return the slots of the snapshots."""
        ranked = self.own_world.size > 1
        replicated = ranked and self.replicate is not None  # replicas are sent from memory
        return SlotPool(
            2 if self.slots is None else self.slots,
            None if self.budget is None else parse_size(self.budget),
            streams=self.on_full != "raise" and not replicated,
            alone=not ranked,
        )
