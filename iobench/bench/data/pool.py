"""RandomPool: memory used in place of a checkpoint of any size. Windows: tensors in it.

Source data must be incompressible, not dedupable and different in every checkpoint. So the pool is
refilled with random bytes before each save, and every tensor is a window of it. When the windows
have come to the pool's end they start again at its beginning, shifted: the same random bytes then
stand at another distance from a block boundary, where fixed-block deduplication does not find them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from iobench import linux
from iobench.units import MIB
from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted
from iobench.writers.image import Bytes

__all__ = ["RandomPool", "Window", "Windows"]

_CHUNK = 4 * MIB
_ALIGNMENT = 64  # of torch's CPU allocator; windows avoid 512, which direct I/O would take as it is
_FINEST = 16  # of any torch dtype's elements
_DIRECT = 512
_TRIM_INTERVAL_S = 0.005  # at 2 GiB/s 10 MiB are mapped meanwhile
_SHIFTS = 56  # multiples of 64 in a page that are none of 512


class RandomPool:
    """`size_bytes` of random bytes, seen as a ring so that one window may be longer than the pool.

    Memory used is `size_bytes`, whatever `longest_bytes` is.
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

    def refill(self, threads: int = 2) -> None:
        """Fill the pool with fresh random bytes: no two fillings share any."""
        streams = self._seeds.spawn(threads)
        share = -(-self.size_bytes // threads // _CHUNK) * _CHUNK

        def fill(index: int) -> None:
            random = np.random.Generator(np.random.SFC64(streams[index]))
            end = min((index + 1) * share, self.size_bytes)
            for start in range(index * share, end, _CHUNK):
                words = self.memory[start : min(start + _CHUNK, end)].view(np.uint64)
                words[:] = random.integers(0, 2**64 - 1, len(words), np.uint64, endpoint=True)

        workers = [Worker(target=fill, args=(index,)) for index in range(threads)]

        def join() -> None:
            for worker in workers:
                if worker.ident is not None:
                    worker.join()

        try:
            for worker in workers:
                worker.start()
        finally:
            uninterrupted(join)

    def trim(self) -> None:
        """Give up what a window longer than the pool has mapped beyond it."""
        self._ring.forget(self.size_bytes)

    @contextmanager
    def trimmed(self) -> Iterator[None]:
        """Keep the resident memory at about the pool's size while a window longer than it is used.

        Such a window is many mappings of the pool, and each would count. Does nothing, and costs
        nothing, while all windows are shorter.
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

    def scrub(self) -> None:
        """Change every byte, so that the bytes to restore cannot be in memory already."""
        key = int.from_bytes(self._keys.integers(1, 256, 8, np.uint8).tobytes(), "little")
        words = self.memory[: self.size_bytes].view(np.uint64)
        np.bitwise_xor(words, np.uint64(key), out=words)


class Window:
    """One tensor's bytes in the pool. Windows of one lap share no memory with each other."""

    __slots__ = ("lap", "memory")

    def __init__(self, memory: Bytes, lap: int) -> None:
        self.memory, self.lap = memory, lap


class Windows:
    """Windows one after another, the same ones each time: for a save, and again for its restore."""

    def __init__(self, pool: RandomPool) -> None:
        self._pool = pool
        self._lap = -1
        self._finer = 0
        self._cursor = pool.size_bytes

    @staticmethod
    def needed_bytes(sizes: Iterable[int]) -> int:
        """Bytes of a pool that holds windows of these sizes in one lap."""
        return linux.PAGE + sum(size + 2 * _ALIGNMENT for size in sizes)

    def take(self, size_bytes: int) -> Window:
        """The next `size_bytes`, never at a multiple of 512.

        64-byte aligned; from the 57th lap on, when all such shifts were had, 16-byte aligned. An
        empty one stands nowhere and moves nothing.
        """
        if not size_bytes:
            return Window(self._pool.memory[:0], 0)
        start = -(-(self._cursor - self._finer) // _ALIGNMENT) * _ALIGNMENT + self._finer
        if start % _DIRECT == 0:
            start += _ALIGNMENT
        if start + size_bytes > self._pool.size_bytes:
            start = self._next_lap()
        self._cursor = start + size_bytes
        return Window(self._pool.memory[start : start + size_bytes], self._lap)

    def _next_lap(self) -> int:
        self._lap += 1
        shift = self._lap % _SHIFTS
        self._finer = self._lap // _SHIFTS % (_ALIGNMENT // _FINEST) * _FINEST
        return (shift + shift // 7 + 1) * _ALIGNMENT + self._finer
