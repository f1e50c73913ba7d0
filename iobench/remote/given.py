"""Local, a tier as a user names it. GivenTiers: those of a Checkpointer, checked and sorted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from iobench.checkpoint.retention import Retention
from iobench.errors import OptionError
from iobench.ranks.world import World
from iobench.remote.memory import Memory, MemoryTier
from iobench.remote.remote import Remote
from iobench.remote.snapshot_memory import SnapshotMemory

__all__ = ["AnyTier", "GivenTiers", "Local"]


@dataclass(frozen=True)
class Local:
    """The local tier: the directory of the Checkpointer, in which a checkpoint is committed.

    - `directory`: that directory, if it is named at all
    - `keep`: which checkpoints stay there, like `keep` of the Checkpointer

    Without it in `tiers` there is a local tier too. Raises OptionError for values out of range.
    """

    directory: str | Path | None = None
    keep: Retention | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and not isinstance(self.keep, Retention):
            raise OptionError(f"keep={self.keep!r}: takes a value such as KeepLast(3)")

    def check(self, location: str | Path) -> None:
        """Raise OptionError when `location` is another directory."""
        if (
            self.directory is not None
            and Path(self.directory).resolve() != Path(location).resolve()
        ):
            raise OptionError(
                f"tiers: Local({str(self.directory)!r}) must be the directory of the Checkpointer, "
                f"{str(location)!r}"
            )


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
