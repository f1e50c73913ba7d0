"""Holdings: all segments of one agent, at most two per key."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

from iobench.dist.replicas.recovery import Version
from iobench.dist.replicas.segment import Key, MemorySegment, NodeMemory
from iobench.errors import ReplicaError

__all__ = ["Holdings"]


class Holdings:
    """Segments by key, two generations each: one complete, one for the version that comes in.

    A version that all ranks have (`settle`) is never overwritten before a newer one is settled. So
    a failure during a transfer always leaves the last settled version.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self.memory = memory
        self._segments: dict[Key, list[MemorySegment]] = {}
        self._expected: frozenset[Key] | None = None
        self._lock = threading.RLock()

    def expect(self, keys: Collection[Key]) -> None:
        """Name the keys that this start of the job will use.

        Segments of other keys stay until a newer version is settled, or until memory is short.
        """
        with self._lock:
            self._expected = frozenset(keys)

    def begin(self, key: Key, version: Version, ranks: int) -> MemorySegment:
        """Return the segment for `version`: the one that has it already, or an empty one."""
        with self._lock:
            own = self._segments.setdefault(key, [])
            for segment in own:
                if segment.version == version:
                    return segment
            if len(own) < 2:
                own.append(MemorySegment(key, self.memory))
                chosen = own[-1]
            else:
                chosen = min(own, key=_worth)
            chosen.begin(version, ranks)
            return chosen

    def make_room(self, key: Key) -> bool:
        """Free segments that this start of the job does not use, for `key`; whether there were any.

        What they hold was saved before this start, and loaded if it was needed.
        """
        with self._lock:
            if self._expected is None:
                return False
            stale = self._segments.keys() - self._expected - {key}
            for one in stale:
                self._free(one)
            return bool(stale)

    def find(self, key: Key, version: Version) -> MemorySegment:
        """Return the complete segment. Raises ReplicaError when there is none."""
        with self._lock:
            for segment in self._segments.get(key, ()):
                if segment.version == version and segment.complete:
                    return segment
        raise ReplicaError(f"step {version.step} of rank {key.members} is not held here")

    def settle(self, version: Version, *, kept: bool) -> None:
        """Protect `version`, which all ranks have; or drop it, because a rank lacks it.

        Once it is protected, keys that lack it are freed: they belong to an earlier placement.
        """
        with self._lock:
            for key, own in list(self._segments.items()):
                held = [segment for segment in own if segment.version == version]
                for segment in held:
                    if kept and segment.complete:
                        segment.confirmed = True
                    else:
                        segment.drop()
                if kept and not any(segment.confirmed for segment in held):
                    older = all(one.version is None or one.version < version for one in own)
                    if older and self._expected is not None and key not in self._expected:
                        self._free(key)

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
                    "members": segment.key.members,
                    "holder": segment.key.holder,
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
            for key in list(self._segments):
                self._free(key)

    def _all(self) -> list[MemorySegment]:
        return [segment for own in self._segments.values() for segment in own]

    def _free(self, key: Key) -> None:
        for segment in self._segments.pop(key):
            segment.free()


def _worth(segment: MemorySegment) -> tuple[bool, bool, int]:
    """Order of the generations: the least is overwritten."""
    serial = segment.version.serial if segment.version else -1
    return segment.confirmed, segment.complete, serial
