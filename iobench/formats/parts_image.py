"""PartsImage: a file image of many small parts of host memory."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator

from iobench.writers.image import Bytes, FileImage, Memory, Segment

__all__ = ["PartsImage"]


class PartsImage(FileImage):
    """An image of uint8 arrays in host memory that makes no object for each of its segments.

    With 10,000 tensors these objects make the garbage collector look at everything there is, which
    takes longer than the copies.
    """

    def __init__(self, path: str, parts: Iterable[Bytes]) -> None:
        """`parts` follow one another; empty ones are skipped."""
        arrays = [part for part in parts if len(part)]
        starts = [0, *itertools.accumulate(map(len, arrays))]
        size = starts.pop()
        values = {"path": path, "on_device": False, "size_bytes": size}
        for name, value in (values | {"_starts": starts, "_arrays": arrays}).items():
            object.__setattr__(self, name, value)  # a FileImage is frozen
        self._check_path()

    _arrays: list[Bytes]

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(
            Segment(offset=start, length=len(array), memory=array)
            for start, array in zip(self._starts, self._arrays, strict=True)
        )

    def parts(self) -> Iterator[tuple[int, Memory]]:
        return zip(self._starts, self._arrays, strict=True)

    @property
    def writable(self) -> bool:
        return all(array.flags.writeable for array in self._arrays)

    def pieces(self, start: int, stop: int) -> list[Memory]:
        self._check_range(start, stop)
        if start == stop:
            return []
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, stop)
        found: list[Memory] = [*self._arrays[first:last]]
        found[-1] = found[-1][: stop - self._starts[last - 1]]
        found[0] = found[0][start - self._starts[first] :]
        return found
