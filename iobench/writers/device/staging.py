"""Staging: copies device memory through pinned host blocks, concurrently with the I/O."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np

from iobench.units import KIB
from iobench.writers.blocks.interrupt_safe import uninterrupted
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.device.base import Device, DeviceBytes, Lane, Mark
from iobench.writers.image import AnyMemory, Bytes, FileImage
from iobench.writers.transfer import Meter

__all__ = ["StagedImage", "staged"]

_AHEAD = 8  # the most blocks that are copied to the host before a worker asks for them
_BEHIND = 4  # the most blocks that are still being copied to the device after they were read
_LEAST = 64 * KIB  # the smallest block; sizes are powers of two, so only few sizes are kept


@contextmanager
def staged(image: FileImage, meter: Meter) -> Iterator[FileImage]:
    """Yield an image for a writer that only uses host memory: `image` itself, or a StagedImage.

    Enter it in the thread that calls the writer: copies are ordered after the work that this thread
    has queued on the device. On exit, also after an error, no copy is in flight, and all streams of
    the device see the bytes that were read. Memory that could not be pinned is a fallback.
    """
    if not image.on_device:
        yield image
        return
    staging = _Staging(image)
    try:
        yield StagedImage(image, staging)
    finally:
        staging.close()
    for reason in staging.unpinned:
        meter.fell_back("pinned memory", "pageable memory", reason)


class StagedImage(FileImage):
    """A FileImage with device memory that is copied through host blocks, for one transfer.

    `gather` and `scatter` return when the copy is complete; they also take blocks on the device.
    `outgoing` copies the following range ahead. `incoming` returns while the block is still being
    copied to the device; the block returns to its pool later.
    """

    _staging: _Staging

    def __init__(self, image: FileImage, staging: _Staging) -> None:
        super().__init__(path=image.path, segments=image.segments)
        object.__setattr__(self, "_staging", staging)

    @contextmanager
    def outgoing(self, start: int, stop: int, meter: Meter) -> Iterator[list[Bytes]]:
        staging = self._staging
        if not _any_device(self.pieces(start, stop)):
            yield self.views(start, stop)
            return
        with meter.phase("gather"):
            block = staging.fetch(start, stop)
        try:
            yield [block[: stop - start]]
        finally:
            staging.blocks.give(block)

    @contextmanager
    def incoming(self, start: int, stop: int, meter: Meter) -> Iterator[list[Bytes]]:
        staging = self._staging
        if not _any_device(self.pieces(start, stop)):
            yield self.views(start, stop)
            return
        block = staging.blocks.take(stop - start)
        try:
            yield [block[: stop - start]]
        except BaseException:
            staging.blocks.give(block)
            raise
        with meter.phase("scatter"):
            staging.store(start, stop, block)

    def gather(self, start: int, stop: int, block: AnyMemory) -> int:
        return self._copy(start, stop, block, to_block=True)

    def scatter(self, start: int, stop: int, block: AnyMemory) -> int:
        return self._copy(start, stop, block, to_block=False)

    def _copy(self, start: int, stop: int, block: AnyMemory, *, to_block: bool) -> int:
        staging = self._staging
        if isinstance(block, np.ndarray):
            staging.pin(block)
        staging.copy(self.pieces(start, stop), block, to_block=to_block)
        return stop - start


def _any_device(pieces: Sequence[AnyMemory]) -> bool:
    return any(isinstance(piece, DeviceBytes) for piece in pieces)


class _Staging:
    """The lanes of one transfer, and the blocks with copies in flight on them."""

    def __init__(self, image: FileImage) -> None:
        self._image = image
        memories = (segment.memory for segment in image.segments)
        devices = dict.fromkeys(m.device for m in memories if isinstance(m, DeviceBytes))
        self._lock = threading.Lock()
        self._ahead: dict[tuple[int, int], tuple[Bytes, list[Mark]]] = {}
        self._behind: deque[tuple[Bytes, list[Mark]]] = deque()
        self.unpinned: dict[str, None] = {}
        self._device = next(iter(devices))
        self.blocks = _PinnedBlocks.of(self._device, self.pin)
        with contextlib.ExitStack() as opened:
            self._lanes: dict[Device, Lane] = {}
            for device in devices:
                self._lanes[device] = lane = device.lane()
                opened.callback(uninterrupted, lane.close)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Wait for all copies and return all blocks to the pool.

        If a copy failed, the blocks are freed instead.
        """
        self._opened.close()
        for block, _ in (*self._ahead.values(), *self._behind):
            self.blocks.give(block)
        self._ahead.clear()
        self._behind.clear()

    def pin(self, block: Bytes) -> None:
        """Pin `block`, or record why it cannot be pinned."""
        reason = self._device.pin(block)
        if reason is not None:
            self.unpinned[reason] = None

    def copy(self, pieces: Sequence[AnyMemory], block: AnyMemory, *, to_block: bool) -> None:
        """Copy, and wait until the copy is complete."""
        self._wait(self._start(pieces, block, to_block=to_block))

    def fetch(self, start: int, stop: int) -> Bytes:
        """Return a block with the bytes [start, stop). The copy may have been started ahead."""
        with self._lock:
            block, marks = self._ahead.pop((start, stop), (None, []))
        if block is None:
            block, marks = self._begin(start, stop)
        try:
            try:
                self._look_ahead(stop, stop - start)
            finally:
                self._wait(marks)
        except BaseException:
            self.blocks.lose(block)
            raise
        return block

    def store(self, start: int, stop: int, block: Bytes) -> None:
        """Start the copy of `block` to the bytes [start, stop) and take ownership of it."""
        try:
            marks = self._start(self._image.pieces(start, stop), block, to_block=False)
        except BaseException:
            self.blocks.lose(block)
            raise
        with self._lock:
            self._behind.append((block, marks))
        while True:
            with self._lock:
                if len(self._behind) <= _BEHIND:
                    return
                block, marks = self._behind.popleft()
            try:
                self._wait(marks)
            except BaseException:
                self.blocks.lose(block)
                raise
            self.blocks.give(block)

    def _look_ahead(self, start: int, length: int) -> None:
        stop = min(start + length, self._image.size_bytes)
        with self._lock:
            wanted = start < stop and (start, stop) not in self._ahead
            if not wanted or len(self._ahead) >= _AHEAD:
                return
        if not _any_device(self._image.pieces(start, stop)):
            return
        begun = self._begin(start, stop)
        with self._lock:
            if self._ahead.setdefault((start, stop), begun) is begun:
                return
        self._wait(begun[1])  # another thread has started the same copy ahead
        self.blocks.give(begun[0])

    def _begin(self, start: int, stop: int) -> tuple[Bytes, list[Mark]]:
        block = self.blocks.take(stop - start)
        try:
            pieces = self._image.pieces(start, stop)
            return block, self._start(pieces, block, to_block=True)
        except BaseException:
            self.blocks.lose(block)
            raise

    def _start(
        self, pieces: Sequence[AnyMemory], block: AnyMemory, *, to_block: bool
    ) -> list[Mark]:
        """Queue the copies and return the marks after them. On failure no copy is in flight."""
        lanes: dict[Lane, None] = {}
        position = 0
        try:
            for piece in pieces:
                part = block[position : position + len(piece)]
                source, destination = (piece, part) if to_block else (part, piece)
                lane = self._lane_for(piece, part)
                if lane is None:
                    np.copyto(cast(Bytes, destination), cast(Bytes, source))
                else:
                    lanes[lane] = None
                    lane.copy(source, destination)
                position += len(piece)
            return [lane.mark() for lane in lanes]
        except BaseException:
            self._wait([lane.mark() for lane in lanes])
            raise

    def _lane_for(self, *memories: AnyMemory) -> Lane | None:
        for memory in memories:
            if isinstance(memory, DeviceBytes):
                return self._lanes[memory.device]
        return None

    def _wait(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            uninterrupted(mark.wait)  # the device uses the memory until then


_kept: weakref.WeakKeyDictionary[Device, dict[int, BlockPool]] = weakref.WeakKeyDictionary()


class _PinnedBlocks:
    """Pools of pinned blocks for one device, kept for the next transfer."""

    def __init__(self, pools: dict[int, BlockPool], pin: Callable[[Bytes], None]) -> None:
        self._pools, self._pin = pools, pin

    @classmethod
    def of(cls, device: Device, pin: Callable[[Bytes], None]) -> _PinnedBlocks:
        return cls(_kept.setdefault(device, {}), pin)  # no lock, here and in `take`: atomic

    def take(self, size_bytes: int) -> Bytes:
        """Return a pinned block of at least `size_bytes`."""
        size = max(_LEAST, 1 << (size_bytes - 1).bit_length())
        block = self._pools.setdefault(size, BlockPool(size)).take()
        self._pin(block)
        return block

    def give(self, block: Bytes) -> None:
        """Return a block that no copy uses any more to its pool."""
        self._pools[len(block)].give(block)

    def lose(self, block: Bytes) -> None:
        """Drop a block whose copy failed. It is freed and not used again."""
