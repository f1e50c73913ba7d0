"""spans: the bytes of a stored tensor that a slice of it needs, in few large ranges.

CutImage: a file of which slices are read into memory of their own.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from iobench import linux
from iobench.formats.safetensors_header import ALIGNMENT
from iobench.formats.tensors import tensor_bytes, tensor_from_bytes
from iobench.units import MIB
from iobench.writers.blocks.pages import pages_to_read_into
from iobench.writers.image import AnyMemory, Bytes, FileImage, Ranges
from iobench.writers.transfer import Meter

GAP_BYTES = MIB
"""Smaller gaps between ranges of a file are read, not skipped: a request costs as much."""


class Span(NamedTuple):
    """Bytes [start, stop) of a tensor, in which a part of a slice has these sizes and strides.

    Strides are in elements, and the part begins at `start`.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def dense(self, itemsize: int) -> bool:
        """Whether every byte belongs to the slice."""
        return prod(self.sizes) * itemsize == self.stop - self.start

    def view(self, data: AnyMemory, dtype: torch.dtype) -> torch.Tensor:
        """Return the part as a view of `data`, the bytes of the span."""
        if self.dense(dtype.itemsize):
            return tensor_from_bytes(data, dtype, self.sizes)
        flat = tensor_from_bytes(data, dtype, (len(data) // dtype.itemsize,))
        return flat.as_strided(self.sizes, self.strides)


def spans(view: torch.Tensor) -> list[Span]:
    """Return what to read for `view`: slices of a contiguous tensor, for example on device meta.

    A slice of rows is one span without other bytes. Of a slice of columns, the span of all rows
    includes the columns between them, unless a gap has 1 MiB or more: then each row is a span.
    The parts follow one another in the slice.
    """
    if not view.numel():
        return []
    sizes, strides, itemsize = tuple(view.shape), view.stride(), view.itemsize
    inner, length = view.dim(), 1
    while inner:
        size, stride = sizes[inner - 1], strides[inner - 1]
        if size > 1 and (stride - length) * itemsize >= GAP_BYTES:
            break
        inner -= 1
        length += (size - 1) * stride
    starts = [int(view.storage_offset())]
    for size, stride in zip(sizes[:inner], strides[:inner], strict=True):
        starts = [start + number * stride for start in starts for number in range(size)]
    return [
        Span(start * itemsize, (start + length) * itemsize, sizes[inner:], strides[inner:])
        for start in starts
    ]


class CutPart:
    """Bytes [start, stop) of a file, of which `memory` gets those of a slice, one after another."""

    def __init__(self, start: int, span: Span, into: torch.Tensor) -> None:
        """`span` is that of a tensor at `start` of the file. `into` has its elements, on the CPU.

        `into` is contiguous.
        """
        self.start, self.stop = start + span.start, start + span.stop
        self.memory = tensor_bytes(into)
        sizes, steps = [into.itemsize], [1]
        for size, stride in zip(reversed(span.sizes), reversed(span.strides), strict=True):
            if stride * into.itemsize == sizes[0] * steps[0]:
                sizes[0] *= size
            elif size > 1:
                sizes.insert(0, size)
                steps.insert(0, stride * into.itemsize)
        self._into, self._steps = self.memory.reshape(sizes), tuple(steps)

    @property
    def dense(self) -> bool:
        """Whether the slice has all bytes of the range."""
        return self._into.ndim == 1

    def take(self, data: Bytes, begin: int) -> None:
        """Copy what `data`, the bytes of the file from `begin` on, has of the slice."""
        _take(self._into, self._steps, data, begin - self.start)


def _take(into: Bytes, steps: Sequence[int], data: Bytes, begin: int) -> None:
    """Fill `into` with those of its bytes that are in `data`, the bytes from `begin` on.

    `steps` are the distances of its elements there, for each dimension. Those of an inner one do
    not reach the next element of an outer one.
    """
    size, step, end = len(into), steps[0], begin + len(data)
    length = 1 + sum((n - 1) * inner for n, inner in zip(into.shape[1:], steps[1:], strict=True))
    first, last = max(0, -(-begin // step)), min(size, (end - length) // step + 1)
    if first < last:  # whole elements
        shape = (last - first, *into.shape[1:])
        np.copyto(into[first:last], np.ndarray(shape, np.uint8, data, first * step - begin, steps))
    if into.ndim > 1:
        for number in {begin // step, (end - 1) // step}:
            if 0 <= number < size and not first <= number < last:
                _take(into[number], steps[1:], data, begin - number * step)


class CutImage(FileImage):
    """A file of which only slices are in memory. What is between them can be read, and is dropped.

    A block with more than one part goes through memory of a writer. So neither the gaps between
    columns nor those between tensors need memory of their own.
    """

    def __init__(self, path: str, size_bytes: int, cuts: Sequence[CutPart]) -> None:
        """`cuts` are in the order of the file and do not overlap; none is empty."""
        self._describe(path, [cut.start for cut in cuts], size_bytes)
        self._cuts = cuts

    @property
    def writable(self) -> bool:
        return True

    @property
    def ranges(self) -> Ranges:
        """What is to be read: all cuts, and the gaps of less than 1 MiB between them."""
        found: list[tuple[int, int]] = []
        for cut in self._cuts:
            near = found and cut.start - found[-1][1] < GAP_BYTES
            start = found.pop()[0] if near else cut.start
            found.append((start, cut.stop))
        return found

    def parts(self) -> Iterator[tuple[int, AnyMemory]]:
        return ((cut.start, cut.memory) for cut in self._cuts)

    def in_one_piece(self, start: int, stop: int) -> bool:
        cut = self._cuts[max(0, bisect.bisect_right(self._starts, start) - 1)]
        return cut.dense and cut.start <= start and stop <= cut.stop

    def _cut(self, first: int, last: int, begin: int, end: int) -> list[AnyMemory]:
        assert last == first + 1, "only `in_one_piece` has views"
        return [self._cuts[first].memory[begin:end]]

    def room(self, start: int, stop: int) -> list[AnyMemory]:
        """Return memory of whole slices, also at the ends: the gaps in a part have none."""
        return [cut.memory for cut in self._overlapping(start, stop)]

    @contextmanager
    def incoming(self, start: int, stop: int, meter: Meter) -> Iterator[list[Bytes]]:
        if self.in_one_piece(start, stop):
            yield self.views(start, stop)
            return
        block = np.empty(stop - start, np.uint8)
        yield [block]
        with meter.phase("scatter"):
            self.scatter(start, stop, block)

    def scatter(self, start: int, stop: int, block: Bytes) -> int:
        for cut in self._overlapping(start, stop):
            cut.take(block[: stop - start], start)
        return stop - start

    def _overlapping(self, start: int, stop: int) -> Iterator[CutPart]:
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        return itertools.islice(self._cuts, first, bisect.bisect_left(self._starts, stop))


def rows_of(whole: torch.Tensor, some: Sequence[Span]) -> torch.Tensor:
    """Return the memory `whole` of a slice as a row for each of its spans."""
    return whole.view(len(some), *some[0].sizes) if some else whole.new_empty(0)


def room_for(start: int, stop: int) -> Bytes:
    """Return memory for the bytes [start, stop) of a file. Raises OSError (ENOMEM).

    A direct read needs no copy into memory that is aligned like the file. Values of a tensor at an
    odd place in the file are aligned all the same.
    """
    begin = 0 if start % ALIGNMENT else start % linux.PAGE
    if stop - start < GAP_BYTES:  # a mapping for each of many small ranges would be too many
        return torch.empty(stop - start, dtype=torch.uint8).numpy()
    return pages_to_read_into(begin + stop - start)[begin:]
