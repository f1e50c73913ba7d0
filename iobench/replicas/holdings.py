"""Holdings: all segments of one agent, at most two per rank."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

from iobench.errors import ReplicaError
from iobench.replicas.recovery import Version
from iobench.replicas.segment import MemorySegment, NodeMemory

__all__ = ["Holdings"]


class Holdings:
    """Segments by rank, two generations each: one complete, one for the version that comes in.

    A version that all ranks have (`settle`) is never overwritten before a newer one is settled. So
    a failure during a transfer always leaves the last settled version.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self.memory = memory
        self._segments: dict[int, list[MemorySegment]] = {}
        self._expected: frozenset[int] | None = None
        self._lock = threading.RLock()

    def expect(self, ranks: Collection[int]) -> None:
        """Name the ranks whose bytes this start of the job will keep here.

        Segments of other ranks stay until a newer version is settled, or until memory is short.
        """
        with self._lock:
            self._expected = frozenset(ranks)

    def begin(self, rank: int, version: Version, ranks: int) -> MemorySegment:
        """Return the segment for `version`: the one that has it already, or an empty one."""
        with self._lock:
            own = self._segments.setdefault(rank, [])
            for segment in own:
                if segment.version == version:
                    return segment
            if len(own) < 2:
                own.append(MemorySegment(rank, self.memory))
                chosen = own[-1]
            else:
                chosen = min(own, key=_worth)
            chosen.begin(version, ranks)
            return chosen

    def make_room(self, rank: int) -> bool:
        """Free segments that this start does not use, for `rank`; return whether there were any.

        What they hold was saved before this start, and loaded if it was needed.
        """
        with self._lock:
            if self._expected is None:
                return False
            stale = self._segments.keys() - self._expected - {rank}
            for one in stale:
                self._free(one)
            return bool(stale)

    def find(self, rank: int, version: Version) -> MemorySegment:
        """Return the complete segment. Raises ReplicaError when there is none."""
        with self._lock:
            for segment in self._segments.get(rank, ()):
                if segment.version == version and segment.complete:
                    return segment
        raise ReplicaError(f"step {version.step} of rank {rank} is not held here")

    def settle(self, version: Version, *, kept: bool) -> None:
        """Protect `version`, which all ranks have; or drop it, because a rank lacks it.

        Once it is protected, ranks that lack it are freed: they belong to an earlier placement.
        """
        with self._lock:
            for rank, own in list(self._segments.items()):
                held = [segment for segment in own if segment.version == version]
                for segment in held:
                    if kept and segment.complete:
                        segment.confirmed = True
                    else:
                        segment.drop()
                if kept and not any(segment.confirmed for segment in held):
                    older = all(one.version is None or one.version < version for one in own)
                    if older and self._expected is not None and rank not in self._expected:
                        self._free(rank)

    def resume(self, version: Version | None) -> None:
        """Protect the version from which training continues; drop all newer ones, of None all."""
        with self._lock:
            for segment in self._all():
                if segment.version is not None:
                    if version is None or segment.version > version:
                        segment.drop()
                    elif segment.version == version and segment.complete:
                        segment.confirmed = True

    def forget(self, step: int) -> None:
        """Drop every version of `step`, for example because it cannot be restored."""
        with self._lock:
            for segment in self._all():
                if segment.version is not None and segment.version.step == step:
                    segment.drop()

    def inventory(self) -> list[dict[str, Any]]:
        """Return a description of every complete segment."""
        with self._lock:
            return [
                {
                    "version": segment.version,
                    "rank": segment.rank,
                    "ranks": segment.ranks,
                    "size_bytes": segment.size_bytes,
                    "confirmed": segment.confirmed,
                }
                for segment in self._all()
                if segment.complete
            ]

    def free(self) -> None:
        """Free all memory."""
        with self._lock:
            for rank in list(self._segments):
                self._free(rank)

    def _all(self) -> list[MemorySegment]:
        return [segment for own in self._segments.values() for segment in own]

    def _free(self, rank: int) -> None:
        for segment in self._segments.pop(rank):
            segment.free()


def _worth(segment: MemorySegment) -> tuple[bool, bool, int]:
    """Order of the generations: the least is overwritten."""
    serial = segment.version.serial if segment.version else -1
    return segment.confirmed, segment.complete, serial
