"""MemorySegment: memory for one rank's bytes, or for parity. NodeMemory: its limits."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from iobench import linux
from iobench.dist.replicas.pieces import DIGEST, PIECE, count_of, digest_at, digest_of
from iobench.dist.replicas.recovery import Version
from iobench.environment.memory import available_bytes
from iobench.errors import ReplicaError
from iobench.units import GIB, format_size
from iobench.writers.image import Bytes

__all__ = ["Key", "MemorySegment", "NodeMemory", "RankBytes"]

_SPARE = GIB
"""Memory that is left to everything else on the node."""


class Key(NamedTuple):
    """What a segment holds: the bytes of the rank `members[0]`, or with `holder` (the position of
    a member) the parity that this member keeps for the group `members`."""

    members: tuple[int, ...]
    holder: int | None = None


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
    """A memory file that holds one version of `key`; valid only while `complete`.

    Several threads may add pieces. A thread that adds to a version that another one replaced gets a
    ReplicaError. The file is sealed against shrinking, so that a process that maps it can always
    read it.
    """

    def __init__(self, key: Key, memory: NodeMemory) -> None:
        self.key = key
        self.version: Version | None = None
        self.ranks = 0
        self.complete = self.confirmed = False
        self.parts: dict[int, RankBytes] = {}
        self.digests = b""
        """Of the bytes in this segment: of parity, other ones than those of its parts."""
        self.capacity_bytes = 0
        self.size_bytes = 0
        self._memory = memory
        self._done: dict[int, set[int]] = {}
        self._written: set[int] = set()
        self._lock = threading.RLock()
        self.fd = os.memfd_create("iobench-replica", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    def begin(self, version: Version, ranks: int) -> None:
        """Make the segment empty, for another version."""
        with self._lock:
            self.drop()
            self.version, self.ranks = version, ranks

    def drop(self) -> None:
        """Make the content invalid; the memory stays, for the next version."""
        with self._lock:
            self.version, self.complete, self.confirmed = None, False, False
            self.parts, self.digests, self.size_bytes = {}, b"", 0
            self._done, self._written = {}, set()

    def declare(self, version: Version, rank: int, part: RankBytes, length: int) -> None:
        """Provide memory for `length` bytes that come from `part` of `rank`. A repeat is allowed.

        Raises ReplicaError when there is no memory, or when another part was declared.
        """
        part.check()
        with self._lock:
            self._check(version)
            if rank in self.parts:
                if self.parts[rank] != part:
                    raise ReplicaError(f"rank {rank} declares two different parts of one version")
                return
            capacity = count_of(length) * PIECE
            if capacity > self.capacity_bytes:
                self._memory.grow(self.fd, self.capacity_bytes, capacity)
                self.capacity_bytes = capacity
            self.size_bytes = max(self.size_bytes, length)
            self.parts[rank] = part
            self._done[rank] = set()

    def add(self, version: Version, rank: int, number: int, first: int, piece: Bytes) -> bool:
        """Add the piece `number` of `rank` as piece `number - first`; False if it is damaged."""
        with self._lock:
            self._check(version)
            if digest_of(piece) != digest_at(self.parts[rank].digests, number):
                return False
            if number in self._done[rank]:
                return True
            place = number - first
            if self.key.holder is None:
                _write(self.fd, piece, place * PIECE)
            else:
                self._add_parity(place, piece)
            self._done[rank].add(number)
            return True

    def _add_parity(self, place: int, piece: Bytes) -> None:
        whole = np.zeros(PIECE, np.uint8)
        if place in self._written:
            os.preadv(self.fd, [whole.data], place * PIECE)
        whole[: len(piece)] ^= piece
        _write(self.fd, whole, place * PIECE)
        self._written.add(place)

    def missing(self, rank: int, numbers: range) -> list[int]:
        """Return the pieces of `rank` that were not added."""
        with self._lock:
            return [number for number in numbers if number not in self._done.get(rank, ())]

    def finish(self, version: Version, expected: dict[int, range]) -> bool:
        """Make the version complete if the pieces of all `expected` ranks are there."""
        with self._lock:
            self._check(version)
            if self.complete:
                return True
            if any(rank not in self.parts or self.missing(rank, n) for rank, n in expected.items()):
                return False
            if self.key.holder is None:
                self.digests = self.parts[self.key.members[0]].digests
            else:
                self.size_bytes = count_of(self.size_bytes) * PIECE
                self.digests = self._own_digests()
            self.complete = True
            return True

    def _own_digests(self) -> bytes:
        piece, digests = np.empty(PIECE, np.uint8), []
        for place in range(count_of(self.size_bytes)):
            if place not in self._written:
                _write(self.fd, np.zeros(PIECE, np.uint8), place * PIECE)
            os.preadv(self.fd, [piece.data], place * PIECE)
            digests.append(digest_of(piece))
        return b"".join(digests)

    def fill(self, version: Version, rank: int, part: RankBytes) -> None:
        """Make the version complete: another process has written the bytes through a mapping."""
        with self._lock:
            self._check(version)
            part.check()
            if part.size_bytes > self.capacity_bytes:
                raise ReplicaError(f"{part.size_bytes} bytes of {self.capacity_bytes} were begun")
            self.parts, self.digests = {rank: part}, part.digests
            self.size_bytes, self.complete = part.size_bytes, True

    def reserve(self, version: Version, length: int) -> None:
        """Provide memory for `length` bytes that another process writes through a mapping."""
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
