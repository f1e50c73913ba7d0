"""CheckedImage: a file image whose checksums are computed over what a writer takes, as it does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from isal import isal_zlib

from iobench.writers.image import Bytes, FileImage, Memory

__all__ = ["CheckedImage", "RunningChecksums"]


class RunningChecksums:
    """CRC32s of parts of a file, each put into the file before a byte behind the part is taken.

    So a checksum may stand right behind its part. Writers take blocks in order and store them while
    the next are taken: what is computed meanwhile costs no time, and the bytes are in the
    processor's cache when they are copied next. Safe to use from many threads.
    """

    def __init__(
        self,
        parts: Mapping[int, Bytes],
        put: Callable[[int, int], None],
        finish: Callable[[Mapping[int, int]], None],
    ) -> None:
        """`parts` by where they begin. `put` is told each start and CRC32, `finish` all of them."""
        self._parts = sorted(parts.items())
        self._put, self._finish = put, finish
        self._found: dict[int, int] = {}
        self._lock = threading.Lock()
        self._position = self._running = 0
        self._done = False

    def reach(self, stop: int) -> None:
        """Put in what stands before `stop`."""
        if self._done:
            return
        with self._lock:
            while len(self._found) < len(self._parts):
                start, memory = self._parts[len(self._found)]
                begin, end = max(self._position - start, 0), min(stop - start, len(memory))
                if begin < end:
                    self._running = isal_zlib.crc32(memory[begin:end], self._running)
                    self._position = start + end
                if end < len(memory):
                    return
                self._put(start, self._running)
                self._found[start], self._running = self._running, 0
            if not self._done:
                self._finish(self._found)
                self._done = True


@dataclass(frozen=True, kw_only=True)
class CheckedImage(FileImage):
    """An image in which `checksums` are as far as anybody has looked."""

    checksums: RunningChecksums

    @classmethod
    def over(cls, image: FileImage, checksums: RunningChecksums) -> CheckedImage:
        """`image`, with the checksums that it still lacks."""
        return cls(path=image.path, segments=image.segments, checksums=checksums)

    def pieces(self, start: int, stop: int) -> list[Memory]:
        self.checksums.reach(stop)
        return super().pieces(start, stop)
