"""RecoveryPlan: the newest save that all ranks can have, and from where. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

__all__ = [
    "CopySource",
    "MemoryCopy",
    "ParityCopy",
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


class ParityCopy(NamedTuple):
    """The parity that the member number `holder` of a group keeps, in the memory of `node`."""

    version: Version
    members: tuple[int, ...]
    holder: int
    ranks: int
    node: int


class StoredCopy(NamedTuple):
    """A committed checkpoint on storage: the bytes of all ranks."""

    version: Version


class CopySource(NamedTuple):
    """Where the bytes of a rank are: `node` for "own" and "peer", `members` for "parity"."""

    kind: Literal["own", "peer", "parity", "storage"]
    node: int | None = None
    members: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """Sources of every rank's bytes of one version.

    `ranks` is the number of ranks that saved; None when only storage knows it. `holders` has the
    nodes with a rank's bytes, `groups` the parity group from which they can be recovered, and
    `parity` the node of each group's parity, by the position of the member that keeps it.
    `passed_over` has newer versions that were not chosen, with the reasons.
    """

    version: Version
    ranks: int | None
    stored: bool
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    groups: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    parity: Mapping[tuple[tuple[int, ...], int], int] = field(default_factory=dict)
    passed_over: tuple[tuple[Version, str], ...] = ()

    def sources(self, rank: int, node: int) -> list[CopySource]:
        """Return where a reader on `node` finds the bytes that `rank` saved, nearest first."""
        held = self.holders.get(rank, ())
        found = [CopySource("own", node)] if node in held else []
        found += [CopySource("peer", other) for other in held if other != node]
        if rank in self.groups:
            found.append(CopySource("parity", None, self.groups[rank]))
        if self.stored:
            found.append(CopySource("storage"))
        return found


def recovery_plan(
    copies: Iterable[MemoryCopy | ParityCopy | StoredCopy],
    *,
    failed: Mapping[int, int] | None = None,
    most_failed: int = 2,
) -> RecoveryPlan | None:
    """Return the plan for the newest version of which every rank's bytes can be had.

    A rank's bytes can be had from memory, from the parity of its group, or from storage. A step
    that already failed `most_failed` restarts (`failed`, by step) is passed over, unless no other
    version is complete. None when no version is complete.
    """
    found: dict[Version, list[MemoryCopy | ParityCopy | StoredCopy]] = defaultdict(list)
    for copy in copies:
        found[copy.version].append(copy)
    passed: list[tuple[Version, str]] = []
    repeated: RecoveryPlan | None = None
    for version in sorted(found, reverse=True):
        plan, lost = _plan_of(version, found[version])
        if plan is None:
            passed.append((version, f"no source has the bytes of {_some(lost)}"))
        elif (count := (failed or {}).get(version.step, 0)) >= most_failed:
            passed.append((version, f"{count} restarts from it failed"))
            repeated = repeated or plan
        else:
            return replace(plan, passed_over=tuple(passed))
    if repeated is None:
        return None
    newer = tuple(one for one in passed if one[0] > repeated.version)
    return replace(repeated, passed_over=newer)


def _plan_of(
    version: Version, copies: list[MemoryCopy | ParityCopy | StoredCopy]
) -> tuple[RecoveryPlan | None, list[int]]:
    """Return the plan, or None and the ranks whose bytes cannot be had."""
    holders: dict[int, list[int]] = defaultdict(list)
    parity: dict[tuple[tuple[int, ...], int], int] = {}
    counts, stored = set(), False
    for copy in copies:
        if isinstance(copy, StoredCopy):
            stored = True
            continue
        counts.add(copy.ranks)
        if isinstance(copy, MemoryCopy):
            holders[copy.rank].append(copy.node)
        else:
            parity[copy.members, copy.holder] = copy.node
    ranks = max(counts, default=None)
    groups = {
        rank: members
        for members in {members for members, _ in parity}
        for position, rank in enumerate(members)
        if _recoverable(members, position, parity, holders)
    }
    lost = [rank for rank in range(ranks or 0) if rank not in holders and rank not in groups]
    if not stored and (lost or ranks is None):
        return None, lost
    nearest = {rank: tuple(sorted(set(nodes))) for rank, nodes in holders.items()}
    return (
        RecoveryPlan(
            version=version,
            ranks=ranks,
            stored=stored,
            holders=nearest,
            groups=groups,
            parity=parity,
        ),
        lost,
    )


def _recoverable(
    members: tuple[int, ...],
    position: int,
    parity: Container[tuple[tuple[int, ...], int]],
    holders: Container[int],
) -> bool:
    """Whether all other members have their parity and their own bytes."""
    others = [other for other in range(len(members)) if other != position]
    return all((members, other) in parity and members[other] in holders for other in others)


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{', ...' if len(ranks) > 8 else ''}"
