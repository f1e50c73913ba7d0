"""spans: the bytes of a stored tensor that a slice of it needs, in few large ranges."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from iobench import linux
from iobench.formats.safetensors_header import ALIGNMENT
from iobench.formats.tensors import flat_tensor, tensor_from_bytes
from iobench.units import MIB
from iobench.writers.blocks.pages import pages_to_read_into
from iobench.writers.image import AnyMemory, Bytes

__all__ = ["GAP_BYTES", "Span", "gathered", "room_for", "rows_of", "spans"]

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


def gathered(
    shape: Sequence[int], dtype: torch.dtype, parts: Sequence[tuple[Span, AnyMemory]]
) -> torch.Tensor:
    """Return the slice of `shape` whose `spans` have these bytes: a copy, unless it is one range.

    So no byte stays in memory that was only read because it is between others.
    """
    if len(parts) == 1 and parts[0][0].dense(dtype.itemsize):
        span, data = parts[0]
        return span.view(data, dtype).view(tuple(shape))
    device = flat_tensor(parts[0][1]).device if parts else "cpu"
    whole = torch.empty(tuple(shape), dtype=dtype, device=device)
    for row, (span, data) in zip(rows_of(whole, [span for span, _ in parts]), parts, strict=True):
        row.copy_(span.view(data, dtype))
    return whole


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
