"""FileImage: the bytes of one file, described and not copied. The narrow waist of iobench."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from iobench.errors import UsageError

__all__ = ["Bytes", "FileImage", "Segment"]

Bytes = npt.NDArray[np.uint8]
"""One dimension of bytes: what a segment's memory looks like inside iobench."""


def _as_bytes(memory: Any) -> Bytes:
    """`memory` (anything with a contiguous buffer) as a one-dimensional uint8 view; no copy."""
    if isinstance(memory, np.ndarray) and memory.dtype == np.uint8 and memory.ndim == 1:
        view: Bytes = memory
    else:
        try:
            view = np.frombuffer(memory, dtype=np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            hint = ""
            if hasattr(memory, "data_ptr"):
                hint = " For a torch tensor use iobench.formats.tensor_bytes(tensor)."
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
    memory: Bytes


@dataclass(frozen=True, kw_only=True)
class FileImage:
    """The bytes of the file `path` (relative to whatever target it is written to), in memory.

    The segments follow one another without gaps from offset 0. Nothing is copied: the memory must
    stay as it is until the transfer returns.
    """

    path: str
    segments: tuple[Segment, ...]
    size_bytes: int = field(init=False)
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

    @classmethod
    def of(cls, path: str, memories: Iterable[Any]) -> FileImage:
        """The image of `memories` one after another; empty ones are left out.

        Each is anything with a contiguous buffer: bytes, memoryview, numpy array, mmap.
        Raises UsageError for memory without such a buffer.
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
        return all(segment.memory.flags.writeable for segment in self.segments)

    def views(self, start: int, stop: int) -> list[Bytes]:
        """Views, in order and without a copy, of the bytes [start, stop) of the file."""
        if not 0 <= start <= stop <= self.size_bytes:
            raise IndexError(f"[{start}, {stop}) of an image of {self.size_bytes} bytes")
        if start == stop:
            return []
        found = []
        index = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            segment = self.segments[index]
            begin = start - segment.offset
            end = min(stop - segment.offset, segment.length)
            found.append(segment.memory[begin:end])
            start = segment.offset + end
            index += 1
        return found

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
