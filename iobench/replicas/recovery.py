"""The versions of a checkpoint that nodes and storage have, and the plan of what is restored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import xxhash

from iobench.checkpoint.checksums import compared
from iobench.checkpoint.ranked.messages import Part
from iobench.errors import ReplicaError
from iobench.writers.image import FileImage


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


def recovery_plan(
    memory: Iterable[MemoryCopy], stored: Collection[Version] = ()
) -> RecoveryPlan | None:
    """Return the plan for the newest version of which every rank's bytes can be had.

    A rank's bytes can be had from memory, and those of a version that is `stored` from storage.
    None when no version is complete.
    """
    found: dict[Version, list[MemoryCopy]] = {version: [] for version in stored}
    for copy in memory:
        found.setdefault(copy.version, []).append(copy)
    passed: list[tuple[Version, str]] = []
    for version, copies in sorted(found.items(), reverse=True):
        holders: dict[int, set[int]] = defaultdict(set)
        for copy in copies:
            holders[copy.rank].add(copy.node)
        ranks = max((copy.ranks for copy in copies), default=None)
        lost = [rank for rank in range(ranks or 0) if rank not in holders]
        if version in stored or not lost:
            return RecoveryPlan(
                version=version,
                ranks=ranks,
                stored=version in stored,
                holders={rank: tuple(sorted(nodes)) for rank, nodes in holders.items()},
                passed_over=tuple(passed),
            )
        passed.append((version, f"no source has the bytes of {_some(lost)}"))
    return None


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{', ...' if len(ranks) > 8 else ''}"


class SaveHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The part manifest of a rank. That of rank 0 has the table of the tensors of all ranks too."""

    part: Part
    created_s: float
    table: str | None = None

    def to_bytes(self) -> bytes:
        """Return the header as JSON, with a checksum of it in front."""
        text = msgspec.json.encode(self)
        return xxhash.xxh3_64_digest(text) + text

    @classmethod
    def parse(cls, data: bytes, where: str) -> SaveHeader:
        """Return the header in `data`. Raises ReplicaError for damage."""
        checksum, text = data[:8], data[8:]
        if xxhash.xxh3_64_digest(text) != checksum:
            raise ReplicaError(f"{where}: the header is damaged")
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ReplicaError(f"{where}: the header is of another version ({error})") from error

    def check(self, image: FileImage) -> None:
        """Raise DataMismatchError unless the bytes are those of the part."""
        with compared(image, self.part.file, f"the replica of rank {self.part.rank}"):
            pass  # they are there already
