"""MemorySegment: memory for one rank's bytes, by pieces. NodeMemory: its limits."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import xxhash

from iobench import linux
from iobench.environment.memory import available_bytes
from iobench.errors import ReplicaError
from iobench.replicas.protocol import Version
from iobench.units import GIB, MIB, format_size
from iobench.writers.image import Bytes

__all__ = [
    *("DIGEST", "PIECE", "Holdings", "MemorySegment", "NodeMemory", "RankBytes"),
    *("count_of", "digest_at", "digest_of", "pieces_of", "runs_of", "span_of"),
]

PIECE = MIB
"""Bytes of a piece, the unit in which replicas are moved and checked. XXH3 holds Python's lock:
1 MiB is 0.1 ms."""
DIGEST = 8
"""Bytes of a digest, big-endian."""

_SPARE = GIB
"""Memory that is left to everything else on the node."""


def count_of(size_bytes: int) -> int:
    """Return the number of pieces; the last one may be shorter."""
    return -(-size_bytes // PIECE)


def span_of(number: int, size_bytes: int) -> tuple[int, int]:
    """Return the begin and the end of a piece of `size_bytes`."""
    return number * PIECE, min((number + 1) * PIECE, size_bytes)


def pieces_of(start: int, stop: int) -> tuple[int, int]:
    """Return the first piece of the bytes [start, stop), and the number after the last."""
    return start // PIECE, -(-stop // PIECE) if stop > start else start // PIECE


def digest_of(piece: Bytes) -> bytes:
    """Return the digest of one piece."""
    return xxhash.xxh3_64_digest(piece.data)


def digest_at(digests: bytes, number: int) -> bytes:
    """Return the digest of the piece `number`."""
    return digests[number * DIGEST : (number + 1) * DIGEST]


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return (begin, end) of each run of consecutive `numbers`, in ascending order."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs


class RankBytes(NamedTuple):
    """A rank's bytes: their number, a digest per piece, and what the saver needs to read them."""

    size_bytes: int
    digests: bytes
    header: bytes

    def check(self) -> None:
        """Raise ReplicaError unless there is a digest for every piece."""
        if self.size_bytes < 0 or len(self.digests) != count_of(self.size_bytes) * DIGEST:
            raise ReplicaError(
                f"{len(self.digests)} bytes of digests do not fit {self.size_bytes} bytes of data"
            )


class NodeMemory:
    """Counts the memory of all segments. `budget_bytes` limits it; None: what the node has left."""

    def __init__(
        self,
        budget_bytes: int | None = None,
        available: Callable[[], int | None] = available_bytes,
    ) -> None:
        self.budget_bytes, self.taken_bytes = budget_bytes, 0
        self._available = available
        self._lock = threading.Lock()

    def grow(self, fd: int, old: int, new: int) -> None:
        """Extend the memory file `fd` from `old` to `new` bytes, with pages.

        Raises ReplicaError when the budget, the node's memory or a limit of a control group does
        not allow it; then nothing was taken. Pages of a memory file are shared memory: they count
        in the control group, but not in the size of /dev/shm.
        """
        needed = new - old
        with self._lock:
            asked = f"{format_size(needed)} more for a replica"
            budget, available = self.budget_bytes, self._available()
            if budget is not None and self.taken_bytes + needed > budget:
                raise ReplicaError(
                    f"{asked} do not fit the agent's budget: {format_size(self.taken_bytes)} of "
                    f"{format_size(budget)} are taken"
                )
            if available is not None and needed + _SPARE > available:
                raise ReplicaError(
                    f"{asked} do not fit the memory of the node: {format_size(available)} are "
                    f"available, {format_size(_SPARE)} of it are left to other processes"
                )
            try:
                # Now, and not at the first access, which cannot fail but by the OOM killer.
                # The file grows with it; tmpfs undoes what it could not do whole.
                linux.fallocate(fd, old, needed)
            except OSError as error:
                raise ReplicaError(f"{asked}: {error.strerror}") from error
            self.taken_bytes += needed

    def give(self, size_bytes: int) -> None:
        """Count `size_bytes` as free again."""
        with self._lock:
            self.taken_bytes -= size_bytes


class MemorySegment:
    """A memory file that holds one version of the bytes of `rank`; valid only while `complete`.

    Several threads may add pieces. A thread that adds to a version that another one replaced gets a
    ReplicaError. The file is sealed against shrinking, so that a process that maps it can always
    read it.
    """

    def __init__(self, rank: int, memory: NodeMemory) -> None:
        self.rank = rank
        self.version: Version | None = None
        self.ranks = 0
        self.complete = self.confirmed = False
        self.part: RankBytes | None = None
        self.capacity_bytes = 0
        self._memory = memory
        self._done: set[int] = set()
        self._lock = threading.RLock()
        self.fd = os.memfd_create("iobench-replica", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    @property
    def size_bytes(self) -> int:
        """Bytes of the version; 0 while they are not known."""
        return 0 if self.part is None else self.part.size_bytes

    def begin(self, version: Version, ranks: int) -> None:
        """Make the segment empty, for another version."""
        with self._lock:
            self.drop()
            self.version, self.ranks = version, ranks

    def drop(self) -> None:
        """Make the content invalid; the memory stays, for the next version."""
        with self._lock:
            self.version, self.complete, self.confirmed = None, False, False
            self.part, self._done = None, set()

    def declare(self, version: Version, part: RankBytes) -> None:
        """Provide memory for the bytes of `part`, which come in pieces. A repeat is allowed.

        Raises ReplicaError when there is no memory, or when another part was declared.
        """
        part.check()
        with self._lock:
            self._check(version)
            if self.part is not None:
                if self.part != part:
                    raise ReplicaError(
                        f"rank {self.rank} declares two different parts of one version"
                    )
                return
            self.reserve(version, part.size_bytes)
            self.part = part

    def add(self, version: Version, number: int, piece: Bytes) -> None:
        """Add the piece `number`. A damaged one stays missing."""
        with self._lock:
            part = self._declared(version)
            if number not in self._done and digest_of(piece) == digest_at(part.digests, number):
                _write(self.fd, piece, number * PIECE)
                self._done.add(number)

    def missing(self, version: Version) -> list[int]:
        """Return the pieces that are missing. Without any, the version is complete."""
        with self._lock:
            part = self._declared(version)
            missing = (
                [] if self.complete else sorted({*range(count_of(part.size_bytes))} - self._done)
            )
            self.complete = not missing
            return missing

    def _declared(self, version: Version) -> RankBytes:
        self._check(version)
        if self.part is None:  # another sender has begun the version again
            raise ReplicaError(f"step {version.step} of rank {self.rank} was not declared")
        return self.part

    def fill(self, version: Version, part: RankBytes) -> None:
        """Make the version complete: another process has written the bytes into the file."""
        with self._lock:
            self._check(version)
            part.check()
            if part.size_bytes > self.capacity_bytes:
                raise ReplicaError(f"{part.size_bytes} bytes of {self.capacity_bytes} were begun")
            self.part, self.complete = part, True

    def reserve(self, version: Version, length: int) -> None:
        """Provide memory for `length` bytes that another process writes into the file."""
        with self._lock:
            self._check(version)
            capacity = count_of(length) * PIECE
            if capacity > self.capacity_bytes:
                self._memory.grow(self.fd, self.capacity_bytes, capacity)
                self.capacity_bytes = capacity

    def free(self) -> None:
        """Free the memory. A process that has mapped the file keeps its pages until it unmaps."""
        with self._lock:
            self.drop()
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
                self._memory.give(self.capacity_bytes)
                self.capacity_bytes = 0

    def _check(self, version: Version) -> None:
        if self.fd < 0 or self.version != version:
            raise ReplicaError(f"step {version.step} was replaced or dropped by another save")


def _write(fd: int, piece: Bytes, offset: int) -> None:
    view = memoryview(piece.data)
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


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
