"""RecoveryPlan: the newest save that all ranks can have, and from where. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

__all__ = [
    "CopySource",
    "MemoryCopy",
    "RecoveryPlan",
    "StoredCopy",
    "Version",
    "recovery_plan",
]


class Version(NamedTuple):
    """One save of all ranks. Of two saves of a run, the later one has the greater `serial`.

    `attempt` is the token of the start of the job that made it. A step that was saved twice, before
    and after a restart, has two versions; their bytes are never mixed.
    """

    serial: int
    step: int
    attempt: str


class MemoryCopy(NamedTuple):
    """The complete bytes of `rank`, one of `ranks` that saved, in the memory of `node`."""

    version: Version
    rank: int
    ranks: int
    node: int


class StoredCopy(NamedTuple):
    """A committed checkpoint on storage: the bytes of all ranks."""

    version: Version


class CopySource(NamedTuple):
    """Where the bytes of a rank are; "own" and "peer" have a `node`."""

    kind: Literal["own", "peer", "storage"]
    node: int | None = None


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """Sources of every rank's bytes of one version.

    `ranks` is the number of ranks that saved; None when only storage knows it. `holders` has the
    nodes with a rank's bytes. `passed_over` has newer versions that are not complete, with the
    reasons.
    """

    version: Version
    ranks: int | None
    stored: bool
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    passed_over: tuple[tuple[Version, str], ...] = ()

    def sources(self, rank: int, node: int) -> list[CopySource]:
        """Return where a reader on `node` finds the bytes that `rank` saved, nearest first."""
        held = self.holders.get(rank, ())
        found = [CopySource("own", node)] if node in held else []
        found += [CopySource("peer", other) for other in held if other != node]
        if self.stored:
            found.append(CopySource("storage"))
        return found


def recovery_plan(copies: Iterable[MemoryCopy | StoredCopy]) -> RecoveryPlan | None:
    """Return the plan for the newest version of which every rank's bytes can be had.

    A rank's bytes can be had from memory or from storage. None when no version is complete.
    """
    found: dict[Version, list[MemoryCopy | StoredCopy]] = defaultdict(list)
    for copy in copies:
        found[copy.version].append(copy)
    passed: list[tuple[Version, str]] = []
    for version in sorted(found, reverse=True):
        plan, lost = _plan_of(version, found[version])
        if plan is not None:
            return replace(plan, passed_over=tuple(passed))
        passed.append((version, f"no source has the bytes of {_some(lost)}"))
    return None


def _plan_of(
    version: Version, copies: list[MemoryCopy | StoredCopy]
) -> tuple[RecoveryPlan | None, list[int]]:
    """Return the plan, or None and the ranks whose bytes cannot be had."""
    holders: dict[int, set[int]] = defaultdict(set)
    memory = [copy for copy in copies if isinstance(copy, MemoryCopy)]
    for copy in memory:
        holders[copy.rank].add(copy.node)
    ranks = max((copy.ranks for copy in memory), default=None)
    stored = len(memory) < len(copies)
    lost = [rank for rank in range(ranks or 0) if rank not in holders]
    if lost and not stored:
        return None, lost
    nearest = {rank: tuple(sorted(nodes)) for rank, nodes in holders.items()}
    return RecoveryPlan(version=version, ranks=ranks, stored=stored, holders=nearest), lost


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{', ...' if len(ranks) > 8 else ''}"
