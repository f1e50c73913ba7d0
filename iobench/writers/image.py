"""FileImage: the bytes of one file, described and not copied. The narrow waist of iobench."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from iobench.errors import UsageError
from iobench.writers.blocks.pages import Bytes
from iobench.writers.device.base import DeviceBytes

if TYPE_CHECKING:
    from iobench.writers.transfer import Meter

__all__ = ["Bytes", "FileImage", "Memory", "Segment"]

Memory = Bytes | DeviceBytes
"""What a segment's memory may be."""


def _as_bytes(memory: Any) -> Memory:
    """`memory` (anything with a contiguous buffer) as a one-dimensional uint8 view; no copy."""
    if isinstance(memory, np.ndarray) and memory.dtype == np.uint8 and memory.ndim == 1:
        view: Bytes = memory
    elif isinstance(memory, DeviceBytes):
        return memory
    else:
        try:
            view = np.frombuffer(memory, dtype=np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            hint = ""
            if hasattr(memory, "data_ptr"):
                hint = " For a torch tensor use iobench.formats.tensors.tensor_memory(tensor)."
            raise UsageError(
                f"a segment's memory must offer a contiguous buffer, "
                f"{type(memory).__name__} does not ({error}).{hint}"
            ) from error
    if not view.flags.c_contiguous:
        raise UsageError("a segment's memory must be contiguous; make a contiguous copy first")
    return view


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """`length` bytes at `offset` of the file that live in `memory` (uint8, one dimension)."""

    offset: int
    length: int
    memory: Memory = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class FileImage:
    """The bytes of the file `path` (relative to whatever target it is written to), in memory.

    The segments follow one another without gaps from offset 0. Nothing is copied: the memory must
    stay as it is until the transfer returns. Where some of it is a device's (`on_device`), a writer
    works on `staging.staged(image)`, which has the bytes on the host.
    """

    path: str
    segments: tuple[Segment, ...]
    size_bytes: int = field(init=False)
    on_device: bool = field(init=False)
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.path or os.path.isabs(self.path) or ".." in self.path.split("/"):
            raise UsageError(
                f"image path {self.path!r}: must be relative and stay below its target"
            )
        expected = 0
        for segment in self.segments:
            if segment.offset != expected or segment.length != len(segment.memory):
                raise UsageError(
                    f"image {self.path!r}: a segment of {segment.length} bytes at "
                    f"{segment.offset} does not continue at {expected}"
                )
            expected += segment.length
        object.__setattr__(self, "size_bytes", expected)
        object.__setattr__(self, "_starts", tuple(s.offset for s in self.segments))
        there = not all(isinstance(segment.memory, np.ndarray) for segment in self.segments)
        object.__setattr__(self, "on_device", there)

    @classmethod
    def of(cls, path: str, memories: Iterable[Any]) -> FileImage:
        """The image of `memories` one after another; empty ones are left out.

        Each is anything with a contiguous buffer (bytes, memoryview, numpy array, mmap), or
        DeviceBytes. Raises UsageError for memory without such a buffer.
        """
        views = [view for view in map(_as_bytes, memories) if len(view)]
        ends = itertools.accumulate(len(view) for view in views)
        segments = tuple(
            Segment(offset=end - len(view), length=len(view), memory=view)
            for view, end in zip(views, ends, strict=True)
        )
        return cls(path=path, segments=segments)

    @property
    def writable(self) -> bool:
        """Whether every segment's memory may be written, as a restore needs it."""
        return all(
            isinstance(segment.memory, DeviceBytes) or segment.memory.flags.writeable
            for segment in self.segments
        )

    def views(self, start: int, stop: int) -> list[Bytes]:
        """Views, in order and without a copy, of the bytes [start, stop) of the file.

        Raises UsageError where they are a device's.
        """
        pieces = self.pieces(start, stop)
        if self.on_device and any(isinstance(piece, DeviceBytes) for piece in pieces):
            raise UsageError(
                f"image {self.path!r}: bytes [{start}, {stop}) are in the memory of a device; "
                "this writer must work on iobench.writers.device.staging.staged(image)"
            )
        return cast(list[Bytes], pieces)

    def pieces(self, start: int, stop: int) -> list[Memory]:
        """`views`, of host and device memory alike."""
        if not 0 <= start <= stop <= self.size_bytes:
            raise IndexError(f"[{start}, {stop}) of an image of {self.size_bytes} bytes")
        if start == stop:
            return []
        found: list[Memory] = []
        index = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            segment = self.segments[index]
            begin = start - segment.offset
            end = min(stop - segment.offset, segment.length)
            found.append(segment.memory[begin:end])
            start = segment.offset + end
            index += 1
        return found

    @contextmanager
    def outgoing(self, start: int, stop: int, meter: Meter) -> Iterator[list[Bytes]]:  # noqa: ARG002
        """Host views of the bytes [start, stop), in order, to be stored inside the `with`.

        The memory itself; of a staged image a copy, whose waiting `meter` times as `gather`.
        """
        yield self.views(start, stop)

    @contextmanager
    def incoming(self, start: int, stop: int, meter: Meter) -> Iterator[list[Bytes]]:  # noqa: ARG002
        """Host views to be filled inside the `with`; left without an error, the image has them.

        The memory itself; of a staged image a block that is copied on, timed as `scatter`.
        """
        yield self.views(start, stop)

    def gather(self, start: int, stop: int, block: Bytes) -> int:
        """Copy the bytes [start, stop) to the beginning of `block`; the count copied. GIL free."""
        return _copy(self.views(start, stop), block, to_block=True)

    def scatter(self, start: int, stop: int, block: Bytes) -> int:
        """Fill the bytes [start, stop) from the beginning of `block`; the count copied."""
        return _copy(self.views(start, stop), block, to_block=False)


def _copy(pieces: Sequence[Bytes], block: Bytes, *, to_block: bool) -> int:
    position = 0
    for piece in pieces:
        part = block[position : position + len(piece)]
        if to_block:
            np.copyto(part, piece)
        else:
            np.copyto(piece, part)
        position += len(piece)
    return position
