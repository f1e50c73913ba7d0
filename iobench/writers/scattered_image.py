"""ScatteredImage: a file image of many parts of memory, described by addresses and lengths."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from iobench import linux
from iobench.writers.image import Bytes, FileImage, Memory, Segment

__all__ = ["Numbers", "ScatteredImage"]

Numbers = np.ndarray[Any, np.dtype[np.int64]]
"""Addresses or lengths."""


class ScatteredImage(FileImage):
    """An image of host memory, to be written, that makes no object for each of its segments.

    A state of 100,000 tensors has as many segments. To make a numpy array of a tensor takes longer
    than to copy 10 kB. So the views of a range are made when a writer takes it. They are slices of
    one array over all addresses, and no byte between the parts is ever touched.
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
        self._set(path=path, on_device=False, _starts=starts)
        self._check_path()
        ends = addresses + lengths
        low = int(addresses.min())
        self._set(
            size_bytes=starts[-1] + int(lengths[-1]),
            _begins=(addresses - low).tolist(),
            _ends=(ends - low).tolist(),
            _memory=np.asarray(_Memory(low, int(ends.max()), owners)),
        )

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # a FileImage is frozen

    _begins: list[int]
    _ends: list[int]
    _memory: Bytes

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(
            Segment(offset=start, length=len(view), memory=view)
            for start, view in zip(self._starts, self.views(0, self.size_bytes), strict=True)
        )

    def pieces(self, start: int, stop: int) -> list[Memory]:
        self._check_range(start, stop)
        if start == stop:
            return []
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, stop)
        begins, ends = self._begins[first:last], self._ends[first:last]
        ends[-1] = self._begins[last - 1] + stop - self._starts[last - 1]
        begins[0] += start - self._starts[first]
        memory = self._memory
        found = [memory[begin:end] for begin, end in zip(begins, ends, strict=True)]
        return cast(list[Memory], found)


class _Memory:
    """The addresses [low, high) as a numpy array interface; every slice keeps the `owners`."""

    def __init__(self, low: int, high: int, owners: object) -> None:
        self._owners = owners
        self.__array_interface__ = linux.array_interface(low, high - low, readonly=True)
