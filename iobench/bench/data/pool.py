"""RandomPool: memory that replaces a checkpoint of any size. Windows: the tensors in it.

Storage must not be able to compress or deduplicate the data, nor know it from an older checkpoint.
So the pool has new random bytes before each save, and every tensor is a window of it.
When the windows reach the pool's end, they start again at its beginning, with a shift. The same
random bytes are then at another distance from a block boundary. Fixed-block deduplication does not
find them there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from iobench import linux
from iobench.units import MIB
from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.image import Bytes
from iobench.writers.transfer import Meter

_CHUNK = 4 * MIB
_SCRUBBED = 64 * MIB  # one call
_ALIGNMENT = 64  # of torch's CPU allocator; memory aligned to 512 would spare direct I/O its copy
_FINEST = 16  # the largest element of a torch dtype, complex128
_DIRECT = 512
_TRIM_INTERVAL_S = 0.005  # 10 MiB are mapped in that time at 2 GiB/s
_SHIFTS = 56  # multiples of 64 in a page that are not multiples of 512


class RandomPool:
    """`size_bytes` of random bytes, mapped as a ring: one window may be longer than the pool.

    The memory in use is `size_bytes`, for any `longest_bytes`. `intact` says that every byte is
    still random: a restore that is not verified may have left other bytes.
    """

    def __init__(self, size_bytes: int, longest_bytes: int, seed: int) -> None:
        page = linux.PAGE
        self.size_bytes = -(-size_bytes // page) * page
        longest = longest_bytes if longest_bytes > self.size_bytes - page else 0
        total = self.size_bytes + -(-longest // page) * page
        self._ring = linux.RepeatedMapping(self.size_bytes, total)
        self.memory: Bytes = np.asarray(self._ring)
        self._seeds = np.random.SeedSequence(seed)
        self._keys = np.random.default_rng(self._seeds.spawn(1)[0])
        self.intact = False

    def renew(self, together: Sequence[int] = ()) -> None:
        """Give the pool bytes that no earlier checkpoint had.

        Random bytes XOR a new random key are as random as before. That takes a seventh of the CPU
        time that new ones take, and is done if the bytes are intact. With `together`, the bytes
        follow from the seed and these numbers alone: every process that gives them has the same.
        """
        if together:
            self.refill(seeds=np.random.SeedSequence(self._seeds.entropy, spawn_key=(0, *together)))
        elif self.intact:
            self.scrub()
        else:
            self.refill()
        self.intact = True

    def refill(self, threads: int = 2, seeds: np.random.SeedSequence | None = None) -> None:
        """Fill the pool with new random bytes; each call without `seeds` uses new random streams.

        numpy releases the GIL while it generates and while it copies, so the threads run in
        parallel. A chunk is small: the temporary array of each thread is not a second pool.
        """
        streams = (seeds or self._seeds).spawn(threads)
        share = -(-self.size_bytes // threads // _CHUNK) * _CHUNK

        def fill(parts: Blocks, _: Meter) -> None:
            for start, end in parts:
                random = np.random.Generator(np.random.SFC64(streams[start // share]))
                for at in range(start, end, _CHUNK):
                    words = self.memory[at : min(at + _CHUNK, end)].view(np.uint64)
                    words[:] = random.integers(0, 2**64 - 1, len(words), np.uint64, endpoint=True)

        parts = Blocks([(0, self.size_bytes)], share)
        run_workers(threads, parts, fill, Meter(), caller_waits=True)

    def trim(self) -> None:
        """Drop the page-table entries beyond the pool's size; the ring keeps the bytes.

        Only a window that is longer than the pool has such entries.
        """
        self._ring.forget(self.size_bytes)

    @contextmanager
    def trimmed(self) -> Iterator[None]:
        """Keep the resident memory near the pool's size while a window is longer than the pool.

        Such a window consists of many mappings of the pool. The kernel counts a page as resident
        once for each mapping that has touched it. While all windows are shorter, does nothing.
        """
        if len(self.memory) == self.size_bytes:
            yield
            return
        done = threading.Event()

        def run() -> None:
            while not done.wait(_TRIM_INTERVAL_S):
                self.trim()

        trimmer = Worker(target=run, name="iobench-trimmer")
        try:
            trimmer.start()
            yield
        finally:
            done.set()
            if trimmer.ident is not None:
                uninterrupted(trimmer.join)
            self.trim()

    def scrub(self, threads: int = 2) -> None:
        """Change every byte: the memory cannot hold the right bytes before a restore.

        The XOR works in place, without the GIL. No byte of the key is zero, so no byte stays the
        same.
        """
        key = int.from_bytes(self._keys.integers(1, 256, 8, np.uint8).tobytes(), "little")

        def change(parts: Blocks, _: Meter) -> None:
            for start, end in parts:
                words = self.memory[start:end].view(np.uint64)
                np.bitwise_xor(words, np.uint64(key), out=words)

        parts = Blocks([(0, self.size_bytes)], _SCRUBBED)
        run_workers(threads, parts, change, Meter(), caller_waits=True)


class Window(NamedTuple):
    """One tensor's bytes [start, stop) in the pool.

    Windows of one lap share no memory with each other.
    """

    start: int
    stop: int
    lap: int


class Windows:
    """Hands out windows of a pool of `pool_bytes` in a fixed order."""

    def __init__(self, pool_bytes: int) -> None:
        self._pool_bytes = self._cursor = pool_bytes
        self._lap = -1
        self._finer = 0

    @staticmethod
    def needed_bytes(sizes: Iterable[int]) -> int:
        """Return the bytes of a pool that holds windows of these sizes in one lap."""
        return linux.PAGE + sum(size + 2 * _ALIGNMENT for size in sizes)

    def take(self, size_bytes: int) -> Window:
        """Return a window of the next `size_bytes`; it never begins at a multiple of 512.

        It is 64-byte aligned. From the 57th lap on, when all such shifts are used, it is 16-byte
        aligned. An empty window has no position and does not move the next one.
        """
        if not size_bytes:
            return Window(0, 0, 0)
        start = -(-(self._cursor - self._finer) // _ALIGNMENT) * _ALIGNMENT + self._finer
        if start % _DIRECT == 0:
            start += _ALIGNMENT
        if start + size_bytes > self._pool_bytes:
            start = self._next_lap()
        self._cursor = start + size_bytes
        return Window(start, self._cursor, self._lap)

    def _next_lap(self) -> int:
        self._lap += 1
        shift = self._lap % _SHIFTS
        self._finer = self._lap // _SHIFTS % (_ALIGNMENT // _FINEST) * _FINEST
        return (shift + shift // 7 + 1) * _ALIGNMENT + self._finer
