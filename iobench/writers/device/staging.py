"""Staging: copies device memory through pinned host blocks, concurrently with the I/O."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from iobench.units import MIB
from iobench.writers.blocks.interrupt_safe import uninterrupted
from iobench.writers.blocks.pages import HUGE_PAGE
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.image import AnyMemory, Bytes, DeviceBytes, FileImage, WrappedImage
from iobench.writers.transfer import Meter

if TYPE_CHECKING:
    from iobench.writers.device.cuda import CopyStream, Device


class DeviceCopies:
    """One stream per device, ordered after everything that the calling thread has queued there.

    Make it in the thread whose work the copies follow: the current stream belongs to the thread.
    After that it is safe to use from many threads. On exit of a `with`, also after an error, no
    copy is in flight: their memory may be freed or used again.
    """

    def __init__(self, devices: Iterable[Device]) -> None:
        self._streams: dict[Device, CopyStream] = {}
        for device in devices:
            self.on(device)

    def on(self, device: Device) -> CopyStream:
        """Return the stream of `device`. If it is new, it is ordered after this thread's work."""
        found = self._streams.get(device)
        return found or self._streams.setdefault(device, device.stream())

    def make(self, pairs: Iterable[tuple[AnyMemory, AnyMemory]]) -> None:
        """Copy each (source, destination) of equal length, and wait for these copies.

        None is in flight afterwards, also after an error. Raises TransferError.
        """
        used: dict[CopyStream, None] = {}
        try:
            for source, destination in pairs:
                memory = next(
                    (m for m in (source, destination) if isinstance(m, DeviceBytes)), None
                )
                if memory is None:
                    np.copyto(cast(Bytes, destination), cast(Bytes, source))
                    continue
                stream = self.on(memory.device)
                used[stream] = None
                stream.copy(source, destination)
        finally:
            _wait_for_all(used)

    def wait(self) -> None:
        """Wait until all copies queued so far are done, also after Ctrl-C. Raises TransferError."""
        _wait_for_all(list(self._streams.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.wait()


def _wait_for_all(streams: Iterable[CopyStream]) -> None:
    with contextlib.ExitStack() as waits:  # goes on with the others after one that failed
        for stream in streams:
            waits.callback(uninterrupted, stream.wait)


_KEPT_BYTES = 256 * MIB
"""Of pinned blocks for the next transfer, on each device: 16 workers with 16 MiB each."""
_AT_ONCE = 16 * MIB


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
    devices = image.devices()
    unpinned: dict[str, None] = {}
    with DeviceCopies(devices) as streams:
        yield StagedImage(image, _copies=streams, _device=devices[0], _unpinned=unpinned)
    for reason in unpinned:
        meter.fell_back("pinned memory", "pageable memory", reason)


class StagedImage(WrappedImage):
    """An image with device memory that is copied through host blocks, for one transfer.

    All methods return when their copies are complete. A writer with two or more workers, or with
    operations in flight, copies one block while others are stored. `gather` and `scatter` also take
    blocks on the device.
    """

    _copies: DeviceCopies
    _device: Device
    _unpinned: dict[str, None]

    @contextmanager
    def outgoing(self, start: int, stop: int, meter: Meter) -> Iterator[list[Bytes]]:
        if not self._on_device(start, stop):
            self._image.taken(start, stop, self._copied)
            with self._image.outgoing(start, stop, meter) as views:
                yield views
            return
        with self._block(stop - start) as block:
            with meter.phase("gather"):
                self.gather(start, stop, block)
            yield [block]

    @contextmanager
    def incoming(self, start: int, stop: int, meter: Meter) -> Iterator[list[Bytes]]:
        if not self._on_device(start, stop):
            with self._image.incoming(start, stop, meter) as views:
                yield views
            return
        with self._block(stop - start) as block:
            yield [block]
            with meter.phase("scatter"):
                self.scatter(start, stop, block)

    def gather(self, start: int, stop: int, block: AnyMemory) -> int:
        self._pin(block)
        pieces = list(self._placed(start, stop, block))
        self._copies.make(pair for pair in pieces if isinstance(pair[0], DeviceBytes))

        def host_bytes(begin: int, end: int) -> Iterator[Bytes]:
            cut = end if isinstance(block, DeviceBytes) else min(max(begin, start), end)
            yield from self._copied(begin, cut)
            if cut < end:
                yield cast(Bytes, block[cut - start : end - start])

        self._image.taken(start, stop, host_bytes)
        self._copies.make(pair for pair in pieces if not isinstance(pair[0], DeviceBytes))
        self._image.released(start, stop)
        return stop - start

    def scatter(self, start: int, stop: int, block: AnyMemory) -> int:
        self._pin(block)
        self._copies.make((part, piece) for piece, part in self._placed(start, stop, block))
        return stop - start

    def _placed(
        self, start: int, stop: int, block: AnyMemory
    ) -> Iterator[tuple[AnyMemory, AnyMemory]]:
        """Yield each piece of the range, and its part of `block`."""
        position = 0
        for piece in self._image.pieces(start, stop):
            yield piece, block[position : position + len(piece)]
            position += len(piece)

    def host_bytes(self, start: int, stop: int) -> Iterator[Bytes]:
        self._image.taken(start, stop, self._copied)
        yield from self._copied(start, stop)

    def _copied(self, start: int, stop: int) -> Iterator[Bytes]:
        if not self._on_device(start, stop):
            yield from self._image.views(start, stop)
            return
        while start < stop:
            with self._block(min(stop - start, _AT_ONCE)) as block:
                self._copies.make(self._placed(start, start + len(block), block))
                yield block
                start += len(block)

    def _on_device(self, start: int, stop: int) -> bool:
        pieces = self._image.pieces(start, stop)
        return any(isinstance(piece, DeviceBytes) for piece in pieces)

    @contextmanager
    def _block(self, size_bytes: int) -> Iterator[Bytes]:
        """Provide a pinned block."""
        with _pool(self._device, size_bytes).block() as block:
            self._pin(block)
            yield block[:size_bytes]

    def _pin(self, block: AnyMemory) -> None:
        if isinstance(block, np.ndarray) and (reason := self._device.pin(block)) is not None:
            self._unpinned[reason] = None


_pools: weakref.WeakKeyDictionary[Device, BlockPool] = weakref.WeakKeyDictionary()


def _pool(device: Device, size_bytes: int) -> BlockPool:
    """Return the pool for blocks of `size_bytes`. Larger ones take the place of smaller ones."""
    pool = _pools.get(device)
    if pool is None or pool.block_size < size_bytes:
        size = -(-size_bytes // HUGE_PAGE) * HUGE_PAGE
        _pools[device] = pool = BlockPool(size, keep=max(2, _KEPT_BYTES // size))
    return pool
