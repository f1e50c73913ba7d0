"""LateImage: an image of tensors, each compared with its layout when its bytes are taken.

To compare 100,000 tensors with those of the last file takes 0.1 s or more. The device would wait
for that. So a save begins to write at once, and compares the tensors of a block before its copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from iobench import linux
from iobench.formats.many_parts import ManyParts, MemorySpan, Numbers
from iobench.formats.tensor_layouts import FileLayout, Located, TensorLayouts
from iobench.writers.image import AnyMemory, Bytes

__all__ = ["LateImage", "LateLayout", "LayoutChangedError"]

_TOGETHER = 64
"""Tensors that are compared at least: of 1 tensor it takes 40 us, of each further one 1.5 us."""

_FEWEST = 2000
"""Tensors; fewer are compared before a save, in 3 ms."""

_ADDRESSES = linux.PAGE, 1 << 62
"""A range that has every address; parts are slices of it."""


class LayoutChangedError(Exception):
    """The tensors differ from those of the last file. What was written is incomplete."""


class LateLayout:
    """The layout of a file of tensors, for images of other tensors. It keeps no tensor alive."""

    @classmethod
    def of(cls, file: FileLayout, layouts: TensorLayouts, order: Numbers) -> LateLayout | None:
        """Return it if all tensors are in the file, and are so many that it is worth it."""
        return cls(file, layouts, order) if _FEWEST <= len(order) == len(layouts.each) else None

    def __init__(self, file: FileLayout, layouts: TensorLayouts, order: Numbers) -> None:
        """The part i + 1 of the file is the tensor `order[i]` of `layouts`. Each is in it once."""
        self.file = file
        self._in_order: Callable[[Sequence[Any]], Sequence[Any]] | None = None
        if (order[1:] < order[:-1]).any():
            self._in_order = operator.itemgetter(*order.tolist())
            layouts = layouts.in_order(order)
        self.layouts = layouts

    def image(self, path: str, tensors: Sequence[torch.Tensor]) -> LateImage:
        """Return the image of other tensors in host memory, all of them `all_plain`."""
        return LateImage(path, self, self._in_order(tensors) if self._in_order else tensors)


class LateImage(ManyParts):
    """An image of a file whose layout is expected to be that of the last one.

    Whoever takes the bytes of a tensor that differs gets LayoutChangedError. Then the file has to
    be written anew, from another image. Threads may take bytes at the same time.
    """

    def __init__(self, path: str, layout: LateLayout, tensors: Sequence[torch.Tensor]) -> None:
        """`tensors` are in the order of the file."""
        file = layout.file
        super().__init__(path, file.starts, file.starts[-1] + int(file.lengths[-1]))
        header, owners = file.header.ctypes.data, [file.header]
        count = len(tensors)
        self._set(
            _layouts=layout.layouts,
            _tensors=tensors,
            _lengths=file.lengths,
            _begins=np.append(header, np.zeros(count, dtype=np.int64)),
            _found=bytearray(b"\1" + bytes(count)),
            _owners=owners,
            _memory=np.asarray(MemorySpan(*_ADDRESSES, owners)),
        )

    _layouts: TensorLayouts
    _tensors: Sequence[torch.Tensor]
    _lengths: Numbers
    _begins: Numbers
    _found: bytearray
    _owners: list[Any]
    _memory: Bytes

    def addresses(self) -> Numbers:
        """Return the addresses of the parts after the header. Raises LayoutChangedError."""
        self._find(0, len(self._found))
        return self._begins[1:]

    def _cut(self, first: int, last: int, begin: int, end: int) -> list[AnyMemory]:
        self._find(first, last)
        begins = self._begins[first:last] - _ADDRESSES[0]
        ends = begins + self._lengths[first:last]
        ends[-1] = begins[-1] + end
        begins[0] += begin
        memory, ranges = self._memory, zip(begins.tolist(), ends.tolist(), strict=True)
        return [memory[one:other] for one, other in ranges]

    def _find(self, first: int, last: int) -> None:
        """Compare the parts [first, last) and find their addresses, unless that was done."""
        first = self._found.find(b"\0", first, last)
        if first < 0:
            return
        last = self._found.rfind(b"\0", first, last) + 1
        last = max(last, min(first + _TOGETHER, len(self._found)))
        located = self._locate(first - 1, last - 1)
        # All owners stay: another thread may use another copy of a lazy conjugation.
        self._owners.append(located.owners)
        self._begins[first:last] = located.addresses
        self._found[first:last] = b"\1" * (last - first)

    def _locate(self, first: int, last: int) -> Located:
        located = self._layouts.locate_part(list(self._tensors[first:last]), first)
        if located is None:
            raise LayoutChangedError(f"{self.path}: tensors [{first}, {last}) have another layout")
        return located
