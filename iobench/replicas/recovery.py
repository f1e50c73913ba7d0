"""The versions of a checkpoint that nodes and storage have, and the plan of what is restored."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import xxhash

from iobench.checkpoint.checksums import compared
from iobench.checkpoint.ranked.messages import Part
from iobench.errors import ReplicaError
from iobench.text import parse_json
from iobench.writers.image import FileImage

__all__ = ["MemoryCopy", "RecoveryPlan", "SaveHeader", "StoredCopy", "Version", "recovery_plan"]


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


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """Where the bytes of every rank of one version are.

    `ranks` is the number of ranks that saved; None when only storage knows it. `holders` has the
    nodes with a rank's bytes. `passed_over` has newer versions that are not complete, with the
    reasons.
    """

    version: Version
    ranks: int | None
    stored: bool
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    passed_over: tuple[tuple[Version, str], ...] = ()


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


@dataclass(frozen=True, kw_only=True)
class SaveHeader:
    """The part manifest of a rank. That of rank 0 has the table of the tensors of all ranks too."""

    part: Part
    created_s: float
    table: str | None = field(default=None, repr=False)

    def to_bytes(self) -> bytes:
        """Return the header as JSON, with a checksum of it in front."""
        document = [self.part.to_json().decode(), self.created_s, self.table]
        text = json.dumps(document, separators=(",", ":")).encode()
        return xxhash.xxh3_64_digest(text) + text

    @classmethod
    def parse(cls, data: bytes, where: str) -> SaveHeader:
        """Return the header in `data`. Raises ReplicaError for damage."""
        checksum, text = data[:8], data[8:]
        if xxhash.xxh3_64_digest(text) != checksum:
            raise ReplicaError(f"{where}: the header is damaged")
        part, created_s, table = parse_json(text)
        own = xxhash.xxh3_64_hexdigest(part.encode())
        return cls(part=Part.parse(part.encode(), own, where), created_s=created_s, table=table)

    def check(self, image: FileImage) -> None:
        """Raise DataMismatchError unless the bytes are those of the part."""
        with compared(image, self.part.file, f"the replica of rank {self.part.rank}"):
            pass  # they are there already
