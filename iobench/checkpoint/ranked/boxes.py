"""boxes: a range of a tensor's elements, as the boxes that DCP's metadata can describe."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

__all__ = ["boxes", "cut_bytes"]


class _Box(NamedTuple):
    """Elements [offset, offset + size) in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[_Box]:
    """Return the boxes of elements [start, stop) of a tensor of `shape`, in row-major order.

    They are disjoint and each is contiguous in memory. Rows that are whole form one box; a part of
    a row at either end adds boxes of the inner dimensions: 2 * len(shape) - 1 at most.
    """
    if start >= stop:
        return []
    if not shape:
        return [_Box((), ())]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # all in one row
        return _in_row(shape, last, start - last * row, stop - last * row)
    found = _in_row(shape, first - 1, row - (first * row - start), row)
    if first < last:
        inner = tuple(shape[1:])
        found.append(_Box((first, *(0 for _ in inner)), (last - first, *inner)))
    return found + _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[_Box]:
    return [
        _Box((row, *box.offsets), (1, *box.sizes))
        for box in boxes(shape[1:], start, stop)
        if start < stop
    ]


def cut_bytes(shape: Sequence[int], itemsize: int, align: int) -> int:
    """Return the step in bytes, at most `align`, at which a tensor is cut into the fewest boxes.

    It is a multiple of the largest inner block (a row, or the rows of an inner dimension) that is
    not larger than `align`. Never less than one element.
    """
    block = prod(shape) * itemsize
    for size in shape:
        if block <= align:
            break
        block //= size
    return max(block, align - align % block) if block else align
