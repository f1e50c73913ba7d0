"""GivenTiers: the tiers that a user gave to a Checkpointer, checked and sorted by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from iobench.checkpoint.retention import Retention
from iobench.errors import OptionError
from iobench.ranks.world import World
from iobench.remote.local import Local
from iobench.remote.memory import Memory
from iobench.remote.memory_tier import MemoryTier
from iobench.remote.remote import Remote
from iobench.remote.snapshot_memory import SnapshotMemory

__all__ = ["AnyTier", "GivenTiers"]

AnyTier: TypeAlias = "Memory | Local | Remote"

_ORDER = (Memory, Local, Remote)


@dataclass(frozen=True, kw_only=True)
class GivenTiers:
    """Memory tiers, fastest first; then the local one and the remote one, if they were given."""

    memories: tuple[Memory, ...] = ()
    local: Local | None = None
    remote: Remote | None = None

    @classmethod
    def of(cls, tiers: Sequence[AnyTier]) -> GivenTiers:
        """Sort `tiers`. Raises OptionError for anything else, another order, or two of a kind."""
        if not isinstance(tiers, Sequence) or not all(isinstance(one, _ORDER) for one in tiers):
            raise OptionError(
                f'tiers={tiers!r}: takes a list such as [Memory("8GiB"), Remote("s3://bucket/run")]'
            )
        kinds = [_ORDER.index(type(one)) for one in tiers]
        if kinds != sorted(kinds):
            raise OptionError("tiers: the order is Memory, Local, Remote: the nearest tier first")
        memories = [one for one in tiers if isinstance(one, Memory)]
        names = [str(one) for one in memories]
        if len(set(names)) < len(names):
            raise OptionError(f"tiers: the same memory twice: {', '.join(names)}")
        local = [one for one in tiers if isinstance(one, Local)]
        remote = [one for one in tiers if isinstance(one, Remote)]
        for kind, found in (("local", local), ("remote", remote)):
            if len(found) > 1:
                raise OptionError(f"tiers: {len(found)} {kind} tiers; one is possible")
        return cls(
            memories=tuple(memories),
            local=local[0] if local else None,
            remote=remote[0] if remote else None,
        )

    def check(self, location: str | Path, options: Mapping[str, Any], *, ranked: bool) -> None:
        """Raise OptionError if a Checkpointer of `location` with `options` cannot use them."""
        if ranked and options.get("placement") and options.get("replicate"):
            raise OptionError("placement: not with replicate in a job of several ranks")
        for name in ("slots", "budget"):
            if self.memories and options.get(name) is not None:
                raise OptionError(f"{name}: the sizes of the Memory tiers decide; leave it out")
        if self.local is not None:
            self.local.check(location)
            if self.local.keep is not None and options.get("keep") is not None:
                raise OptionError("keep: is given twice, for the Checkpointer and for Local")

    @property
    def keep(self) -> Retention | None:
        """The retention of the local tier, if it is given with it."""
        return self.local.keep if self.local is not None else None

    def snapshot_memory(self, world: World) -> SnapshotMemory | None:
        """Open the memory tiers, of which each process of a node has an equal share.

        None without any. Raises OptionError for memory that does not exist here, UnavailableError.
        """
        if not self.memories:
            return None
        shares = [MemoryTier(one, sharers=world.local_size) for one in self.memories]
        return SnapshotMemory(shares, world)
