"""FileImage: the bytes of one file, as references to memory.

Formats produce file images, writers move them to storage and back. Progress: which parts of a file
are complete.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast

import numpy as np

from iobench.errors import UsageError
from iobench.writers.blocks.pages import AnyMemory as AnyMemory
from iobench.writers.blocks.pages import Bytes as Bytes
from iobench.writers.blocks.pages import DeviceBytes as DeviceBytes

if TYPE_CHECKING:
    from iobench.writers.device.cuda import Device
    from iobench.writers.transfer import Meter

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Ranges [start, stop) of a file, in its order. They do not overlap."""
FileRanges: TypeAlias = tuple["FileImage", Ranges]
"""An image of a file, and what is to be read of it."""
HostBytes: TypeAlias = Callable[[int, int], Iterator[Bytes]]
"""Yields a range of device memory, given by offsets in the file, piece by piece on the host."""


def _as_bytes(memory: Any) -> AnyMemory:
    """Return `memory` as a one-dimensional uint8 view, without a copy; see `FileImage.of`."""
    if isinstance(memory, np.ndarray) and memory.dtype == np.uint8 and memory.ndim == 1:
        view: Bytes = memory
    elif isinstance(memory, DeviceBytes):
        return memory
    elif _is_tensor(memory):
        from iobench.writers.device.cuda import in_place_memory

        return in_place_memory(memory)
    else:
        try:
            view = np.frombuffer(memory, dtype=np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise UsageError(
                f"a segment's memory must offer a contiguous buffer, "
                f"{type(memory).__name__} does not ({error})"
            ) from error
    if not view.flags.c_contiguous:
        raise UsageError("a segment's memory must be contiguous; make a contiguous copy first")
    return view


def _is_tensor(memory: Any) -> bool:
    """Whether it is a torch tensor. This does not load torch: before, no tensor exists."""
    return isinstance(memory, getattr(sys.modules.get("torch"), "Tensor", ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """`length` bytes of the file from `offset`, held in `memory` (uint8, one dimension)."""

    offset: int
    length: int
    memory: AnyMemory = field(repr=False)


class FileImage:
    """The bytes of the file `path`, in memory. `path` is relative to the target of a transfer.

    Its parts follow one another without gaps from offset 0. Nothing is copied: the memory must
    not change until the transfer returns. When some of it is on a device (`on_device`), a writer
    works on `staging.staged(image)`, which provides the bytes on the host.

    No object is made for each part before `segments` is asked for: with those of a state of 100,000
    tensors, the garbage collector takes longer than the copies.
    """

    path: str
    size_bytes: int
    on_device: bool
    _starts: Sequence[int]
    _parts: list[AnyMemory]

    def __init__(self, *, path: str, segments: Iterable[Segment]) -> None:
        """Raises UsageError unless each segment begins where the one before it ends."""
        expected, parts = 0, []
        for segment in segments:
            if segment.offset != expected or segment.length != len(segment.memory):
                raise UsageError(
                    f"image {path!r}: a segment of {segment.length} bytes at "
                    f"{segment.offset} does not continue at {expected}"
                )
            expected += segment.length
            parts.append(segment.memory)
        self._hold(path, parts)

    def _hold(self, path: str, parts: Iterable[AnyMemory]) -> None:
        """Set the attributes of an image of `parts`."""
        self._parts = [part for part in parts if len(part)]
        starts = [0, *itertools.accumulate(map(len, self._parts))]
        size, kinds = starts.pop(), set(map(type, self._parts))
        on_device = any(issubclass(kind, DeviceBytes) for kind in kinds)
        self._describe(path, starts, size, on_device=on_device)

    def _describe(
        self, path: str, starts: Sequence[int], size_bytes: int, *, on_device: bool = False
    ) -> None:
        """Set the attributes of an image whose parts begin at `starts` of the file."""
        if not path or os.path.isabs(path) or ".." in path.split("/"):
            raise UsageError(f"image path {path!r}: must be relative and stay below its target")
        self.path, self.size_bytes, self.on_device = path, size_bytes, on_device
        self._starts = starts

    @classmethod
    def of(cls, path: str, memories: Iterable[Any]) -> Self:
        """Make an image of `memories` in this order; empty ones are skipped.

        Each has a contiguous buffer (bytes, memoryview, numpy array, mmap), is a dense, contiguous
        torch tensor on the CPU or a CUDA device, or is DeviceBytes. Raises UsageError for any other
        memory.
        """
        return cls.of_parts(path, map(_as_bytes, memories))

    @classmethod
    def of_parts(cls, path: str, parts: Iterable[AnyMemory]) -> Self:
        """Make an image like `of`, of uint8 arrays and DeviceBytes, which are not checked."""
        image = cls.__new__(cls)
        image._hold(path, parts)
        return image

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The parts, described."""
        return tuple(
            Segment(offset=start, length=len(memory), memory=memory)
            for start, memory in self.parts()
        )

    @property
    def writable(self) -> bool:
        """Whether the memory of every part is writable, which a restore requires."""
        return all(
            isinstance(memory, DeviceBytes) or memory.flags.writeable for _, memory in self.parts()
        )

    def parts(self) -> Iterator[tuple[int, AnyMemory]]:
        """Yield (offset in the file, memory) of each part, in order."""
        return zip(self._starts, self._parts, strict=True)

    def devices(self) -> list[Device]:
        """Return the devices that have some of the memory."""
        if not self.on_device:
            return []
        found = (memory.device for _, memory in self.parts() if isinstance(memory, DeviceBytes))
        return list(dict.fromkeys(found))

    def host_bytes(self, start: int, stop: int) -> Iterator[Bytes]:
        """Yield the bytes [start, stop) in order; each part is valid until the next one.

        They are `views` of the memory itself. A staged image copies from its device.
        """
        yield from self.views(start, stop)

    def views(self, start: int, stop: int) -> list[Bytes]:
        """Return views of the bytes [start, stop) of the file, in order and without a copy.

        Raises UsageError when some of them are on a device.
        """
        pieces = self.pieces(start, stop)
        if self.on_device and any(isinstance(piece, DeviceBytes) for piece in pieces):
            raise UsageError(
                f"image {self.path!r}: bytes [{start}, {stop}) are in the memory of a device; "
                "this writer must work on iobench.writers.device.staging.staged(image)"
            )
        return cast(list[Bytes], pieces)

    def pieces(self, start: int, stop: int) -> list[AnyMemory]:
        """Like `views`, for both host and device memory."""
        self._check_range(start, stop)
        if start == stop:
            return []
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, stop)
        return self._cut(first, last, start - self._starts[first], stop - self._starts[last - 1])

    def _cut(self, first: int, last: int, begin: int, end: int) -> list[AnyMemory]:
        """Return the parts [first, last), the first one from `begin` and the last one to `end`."""
        found = self._parts[first:last]
        found[-1] = found[-1][:end]
        found[0] = found[0][begin:]
        return found

    def room(self, start: int, stop: int) -> list[AnyMemory]:
        """Return the memory that a read of the bytes [start, stop) fills, in file order."""
        return self.pieces(start, stop)

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.size_bytes:
            raise IndexError(f"[{start}, {stop}) of an image of {self.size_bytes} bytes")

    def in_one_piece(self, start: int, stop: int) -> bool:
        """Whether the bytes [start, stop), one or more, are in one part."""
        starts = self._starts
        return bisect.bisect_right(starts, start) == bisect.bisect_left(starts, stop)

    @contextmanager
    def outgoing(self, start: int, stop: int, meter: Meter) -> Iterator[list[Bytes]]:  # noqa: ARG002
        """Provide host views of the bytes [start, stop), in order; store them inside the `with`.

        They are views of the memory itself. A staged image provides a copy, and `meter` counts the
        wait for it as `gather`.
        """
        yield self.views(start, stop)
        self.released(start, stop)

    @contextmanager
    def incoming(self, start: int, stop: int, meter: Meter) -> Iterator[list[Bytes]]:  # noqa: ARG002
        """Provide host views of the bytes [start, stop), in order; fill them inside the `with`.

        They are views of the memory itself. A staged image provides a block, and copies it to the
        device when the `with` ends without an error; `meter` counts that as `scatter`.
        """
        yield self.views(start, stop)

    def filled(self, start: int, stop: int) -> None:
        """Note that a read has filled the bytes [start, stop); their memory is not written again.

        Writers call it in any thread while they read. It does nothing here.
        """

    def released(self, start: int, stop: int) -> None:
        """Note that a writer has copied or stored the bytes [start, stop).

        `gather` and `outgoing` call it, in any thread. It does nothing here.
        """

    def taken(self, start: int, stop: int, host_bytes: HostBytes) -> None:
        """Note that a writer takes the bytes [start, stop) of this image with device memory.

        A staged image calls it in any thread, before it copies host memory of the range. So this
        memory may still be changed. `host_bytes(begin, end)` yields the bytes of device memory up
        to `stop`, in order. It does nothing here.
        """

    def gather(self, start: int, stop: int, block: Bytes) -> int:
        """Copy the bytes [start, stop) to the beginning of `block`; return their count.

        The GIL is released for each part, so that other threads work during the copy.
        """
        if stop > start:
            np.concatenate(self.views(start, stop), out=block[: stop - start])
        self.released(start, stop)
        return stop - start

    def scatter(self, start: int, stop: int, block: Bytes) -> int:
        """Fill the bytes [start, stop) from the beginning of `block`; return their count."""
        position = 0
        for view in self.views(start, stop):
            np.copyto(view, block[position : position + len(view)])
            position += len(view)
        return position


class Extent(NamedTuple):
    """Bytes [start, stop) of `image`, and the `offset` in the file at which they are moved.

    A write puts them at `offset`. A read begins at `offset` <= `start`, which is aligned, and drops
    what comes before `start`; each byte has the same place in the file and in the image.
    """

    image: FileImage
    start: int
    stop: int
    offset: int

    @classmethod
    def of(cls, data: Bytes, offset: int) -> Extent:
        """Return all of `data`, to be written at `offset`."""
        return cls(FileImage.of("block", [data]), 0, len(data), offset)

    @property
    def size_bytes(self) -> int:
        """The number of bytes of the image."""
        return self.stop - self.start

    def filled(self, ok: bool) -> None:
        """Completion callback of a read."""
        if ok:
            self.image.filled(self.start, self.stop)


class WrappedImage(FileImage):
    """The image `image`. No object is made for each of its parts."""

    def __init__(self, image: FileImage, **values: object) -> None:
        """`values` are further attributes."""
        self._image = image
        self.path, self.size_bytes, self.on_device = image.path, image.size_bytes, image.on_device
        vars(self).update(values)

    @property
    def writable(self) -> bool:
        return self._image.writable

    def parts(self) -> Iterator[tuple[int, AnyMemory]]:
        return self._image.parts()

    def devices(self) -> list[Device]:
        return self._image.devices()

    def pieces(self, start: int, stop: int) -> list[AnyMemory]:
        return self._image.pieces(start, stop)

    def room(self, start: int, stop: int) -> list[AnyMemory]:
        return self._image.room(start, stop)

    def in_one_piece(self, start: int, stop: int) -> bool:
        return self._image.in_one_piece(start, stop)

    def released(self, start: int, stop: int) -> None:
        self._image.released(start, stop)

    def filled(self, start: int, stop: int) -> None:
        self._image.filled(start, stop)

    def taken(self, start: int, stop: int, host_bytes: HostBytes) -> None:
        self._image.taken(start, stop, host_bytes)


class WatchedImage(WrappedImage):
    """The image `image`; `noted` is called with each range that a writer has filled."""

    def __init__(self, image: FileImage, noted: Callable[[int, int], None]) -> None:
        super().__init__(image, _noted=noted)

    _noted: Callable[[int, int], None]

    def filled(self, start: int, stop: int) -> None:
        super().filled(start, stop)
        self._noted(start, stop)


class Progress:
    """Parts [start, stop) of a file that do not overlap. Thread-safe."""

    def __init__(self, parts: Sequence[tuple[int, int]]) -> None:
        """`parts` in file order; they are known by their place in this list."""
        self._parts = parts
        self._starts = [start for start, _ in parts]
        self._filled: dict[int, dict[int, int]] = {}
        self._complete = [False] * len(parts)
        self._lock = threading.Lock()

    def filled(self, start: int, stop: int) -> list[int]:
        """Return the numbers of the parts that are complete now that [start, stop) is filled.

        Each is returned once, whatever ranges are filled a second time.
        """
        complete = []
        with self._lock:
            first = max(0, bisect.bisect_right(self._starts, start) - 1)
            for number in range(first, bisect.bisect_left(self._starts, stop)):
                begin, end = self._parts[number]
                if self._complete[number] or end <= start:
                    continue
                ranges = self._filled.setdefault(number, {})
                at = max(start, begin)
                ranges[at] = max(min(stop, end), ranges.get(at, 0))
                if _covers(ranges, begin, end):
                    self._complete[number] = True
                    del self._filled[number]
                    complete.append(number)
        return complete


def _covers(ranges: Mapping[int, int], start: int, stop: int) -> bool:
    """Whether the ranges, of which each start has its stop, cover [start, stop)."""
    for begin, end in sorted(ranges.items()):
        if begin > start:
            return False
        start = max(start, end)
    return start >= stop
