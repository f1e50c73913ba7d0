"""CheckedImage: a file image whose checksums are computed while a writer reads it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from isal import isal_zlib

from iobench.formats.many_parts import PartsImage
from iobench.writers.image import AnyMemory, Bytes

__all__ = ["CheckedImage", "RunningChecksums"]


class RunningChecksums:
    """CRC32s of parts of a file. Each is in the file before a writer takes a byte after its part.

    So a checksum can directly follow its part. Writers take blocks in order and store them while
    the next blocks are taken. The computation runs during that I/O, and the bytes are in the CPU's
    cache when they are copied next. Thread-safe.
    """

    def __init__(
        self,
        parts: Mapping[int, Bytes],
        put: Callable[[int, int], None],
        finish: Callable[[Mapping[int, int]], None],
    ) -> None:
        """`parts` maps offsets to memory. `put(offset, crc)` gets each CRC32, `finish` all."""
        self._parts = sorted(parts.items())
        self._put, self._finish = put, finish
        self._found: dict[int, int] = {}
        self._lock = threading.Lock()
        self._position = self._running = 0
        self._done = False

    def reach(self, stop: int) -> None:
        """Compute and store the checksums of all parts that end at or before `stop`."""
        if self._done:
            return
        with self._lock:
            while len(self._found) < len(self._parts):
                start, memory = self._parts[len(self._found)]
                length = len(memory)
                if self._position <= start and start + length <= stop:  # most are taken whole
                    self._running = isal_zlib.crc32(memory)
                    self._position = start + length
                else:
                    begin, end = max(self._position - start, 0), min(stop - start, length)
                    if begin < end:
                        self._running = isal_zlib.crc32(memory[begin:end], self._running)
                        self._position = start + end
                    if end < length:
                        return
                self._put(start, self._running)
                self._found[start], self._running = self._running, 0
            if not self._done:
                self._finish(self._found)
                self._done = True


class CheckedImage(PartsImage):
    """An image that completes `checksums` up to the end of each range that is taken."""

    def __init__(self, path: str, parts: Iterable[Bytes], checksums: RunningChecksums) -> None:
        super().__init__(path, parts)
        object.__setattr__(self, "_checksums", checksums)

    _checksums: RunningChecksums

    def pieces(self, start: int, stop: int) -> list[AnyMemory]:
        self._checksums.reach(stop)
        return super().pieces(start, stop)
