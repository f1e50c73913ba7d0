"""File images of formats.

CheckedImage: its checksums are computed while a writer reads it. ScatteredImage: it is described by
addresses. WindowImage: one range of a file.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from isal import isal_zlib

from iobench import linux
from iobench.writers.image import AnyMemory, Bytes, DeviceBytes, FileImage, HostBytes

Numbers = np.ndarray[Any, np.dtype[np.int64]]
"""Addresses or lengths."""


class RunningChecksums:
    """CRC32s of parts of a file. Each is in the file before a writer takes a byte after its part.

    So a checksum can directly follow its part. Writers take blocks in order and store them while
    the next blocks are taken. The computation runs during that I/O, and the bytes are in the CPU's
    cache when they are copied next. Thread-safe.
    """

    def __init__(
        self,
        parts: Mapping[int, AnyMemory],
        put: Callable[[int, int], None],
        finish: Callable[[Mapping[int, int]], None] = lambda _: None,
    ) -> None:
        """`parts` maps offsets to memory. `put(offset, crc)` gets each CRC32, `finish` all."""
        self._parts = sorted(parts.items())
        self._put, self._finish = put, finish
        self._found: dict[int, int] = {}
        self._lock = threading.Lock()
        self._position = self._running = self._reached = 0
        self._done = False

    def reach(self, stop: int, host_bytes: HostBytes | None = None) -> None:
        """Compute and store the checksums of all parts that end at or before `stop`.

        `host_bytes` yields the bytes of parts on a device; without it all parts are on the host.
        """
        if self._done or stop <= self._reached:  # no wait for a thread that is further
            return
        with self._lock:
            while len(self._found) < len(self._parts):
                start, memory = self._parts[len(self._found)]
                length = len(memory)
                begin, end = max(self._position - start, 0), min(stop - start, length)
                if begin < end:
                    self._running = self._checksum(memory, start, begin, end, host_bytes)
                    self._position = start + end
                if end < length:
                    self._reached = max(self._reached, stop)
                    return
                self._put(start, self._running)
                self._found[start], self._running = self._running, 0
            if not self._done:
                self._finish(self._found)
                self._done = True

    def _checksum(
        self, memory: AnyMemory, start: int, begin: int, end: int, host_bytes: HostBytes | None
    ) -> int:
        """Continue the running checksum over the bytes [begin, end) of the part at `start`."""
        if isinstance(memory, np.ndarray):
            if end - begin < len(memory):  # most are taken whole
                memory = memory[begin:end]
            return int(isal_zlib.crc32(memory, self._running))
        assert host_bytes is not None, "a writer took device memory without staging it"
        running = self._running
        for data in host_bytes(start + begin, start + end):
            running = isal_zlib.crc32(data, running)
        return running


class CheckedImage(FileImage):
    """An image that completes the checksums up to the end of each range that is taken.

    Bytes on a device are added in the block to which a writer copies them. A worker that is ahead
    of the one before it copies that one's bytes too: the checksum needs them in order.
    """

    def __init__(
        self, path: str, parts: Iterable[AnyMemory], checksums: Mapping[int, RunningChecksums]
    ) -> None:
        """`checksums` are by the offset from which on the file depends on them, up to the next one.

        A thread that takes a range completes the checksums of that range alone, and waits for no
        thread that takes another one.
        """
        self._hold(path, parts)
        self._begins, self._checksums = sorted(checksums), checksums

    def pieces(self, start: int, stop: int) -> list[AnyMemory]:
        if not self.on_device:
            self.taken(start, stop)
        return super().pieces(start, stop)

    def taken(self, start: int, stop: int, host_bytes: HostBytes | None = None) -> None:
        first = max(0, bisect_right(self._begins, start) - 1)
        for begin in self._begins[first : bisect_left(self._begins, stop)]:
            self._checksums[begin].reach(stop, host_bytes)


class ScatteredImage(FileImage):
    """An image of memory described by addresses and lengths, to be written.

    To make a numpy array of a tensor takes longer than to copy 10 kB. So the views of a range are
    made when a writer takes it. They are slices of one array over all addresses, and no byte
    between the parts is ever touched.
    """

    def __init__(
        self,
        path: str,
        *,
        starts: Sequence[int],
        addresses: Numbers,
        lengths: Numbers,
        owners: object,
    ) -> None:
        """The part at `starts[i]` of the file has `lengths[i]` > 0 bytes at `addresses[i]`.

        The parts follow one another without gaps. `owners` keeps their memory alive.
        """
        self._describe(path, starts, starts[-1] + int(lengths[-1]))
        ends = addresses + lengths
        low = int(addresses.min())
        span = linux.MemorySpan(low, int(ends.max()) - low, owners, readonly=True)
        self._memory: Bytes = np.asarray(span)
        self._begins: list[int] = (addresses - low).tolist()
        self._ends: list[int] = (ends - low).tolist()

    def parts(self) -> Iterator[tuple[int, AnyMemory]]:
        return zip(self._starts, self.pieces(0, self.size_bytes), strict=True)

    def _cut(self, first: int, last: int, begin: int, end: int) -> list[AnyMemory]:
        begins, ends = self._begins[first:last], self._ends[first:last]
        ends[-1] = self._begins[last - 1] + end
        begins[0] += begin
        memory = self._memory
        return [memory[one:other] for one, other in zip(begins, ends, strict=True)]


class WindowImage(FileImage):
    """An image of a file of which one range is in memory. Only this range can be read."""

    def __init__(self, path: str, size_bytes: int, start: int, memory: AnyMemory) -> None:
        """The file's bytes from `start` on go to `memory`, until one of them ends."""
        self._parts = [memory[: size_bytes - start]]
        on_device = isinstance(memory, DeviceBytes)
        self._describe(path, [start], size_bytes, on_device=on_device)

    def _cut(self, first: int, last: int, begin: int, end: int) -> list[AnyMemory]:
        size = len(self._parts[0])
        if not 0 <= begin <= end <= size:
            raise IndexError(f"[{begin}, {end}) of a window of {size} bytes")
        return super()._cut(first, last, begin, end)
