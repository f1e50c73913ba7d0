"""read_tensors: the bytes of stored tensors, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from iobench import linux
from iobench.checkpoint.stored import disjoint
from iobench.errors import DataMismatchError, UsageError
from iobench.exports.layouts import ExportTensor
from iobench.formats.read_ahead import FileRange, joined, read_ahead
from iobench.formats.tensors import tensor_bytes, tensor_from_bytes, torch_dtype
from iobench.units import format_size
from iobench.verification.inventory import (
    CheckedRange,
    FileTree,
    ListedTensor,
    TensorPart,
    VerifyInventory,
)
from iobench.verification.reading import RangeCheck
from iobench.writers.image import Bytes

_Key = tuple[str, int, int]
_Box = tuple[tuple[int, int], ...]
"""[begin, end) in each dimension."""


class _Piece(NamedTuple):
    """Bytes [start, stop) of the file of `part`, which belong to the tensor number `tensor`.

    Without a `block` they are the next bytes of the tensor. Otherwise they are the `box` of a block
    of this shape, or, without a box, its bytes from `at` on; `last` completes it.
    """

    tensor: int
    part: TensorPart
    start: int
    stop: int
    block: tuple[int, ...] = ()
    box: _Box = ()
    at: int = 0
    last: bool = False


def checksums_of(inventory: VerifyInventory) -> dict[_Key, CheckedRange]:
    """Return the ranges of files that have a checksum, by path, start and stop."""
    return {
        (path, one.start, one.stop): one
        for path, file in inventory.files.items()
        for layer in file.layers
        for one in layer
        if one.xxh3_64 or one.crc32 is not None
    }


def read_tensors(
    location: FileTree,
    tensors: Sequence[ListedTensor],
    expected: Mapping[_Key, CheckedRange],
    *,
    piece_bytes: int,
) -> Generator[tuple[int, Bytes], None, None]:
    """Yield the number of each of `tensors` with its next bytes, until it is complete.

    A tensor without elements is left out. The bytes stay until the next ones are taken. Memory is
    bounded by six times `piece_bytes` and what `check_fits` has found. Parts of tensors whose range
    is in `expected` are compared with its checksum. Raises DataMismatchError and TransferError.
    """
    check = _Check(location, tensors, expected)
    block: Any = None
    pieces = (
        FileRange(one.part.file, one.start, one.stop, one) for one in _pieces(tensors, piece_bytes)
    )
    reading = read_ahead(
        location.writer,
        location.home,
        location.sizes,
        joined(pieces, location.sizes, piece_bytes),
        largest_bytes=piece_bytes + 2 * linux.PAGE,
    )
    for window, memory in reading:
        for one in window.wanted:
            piece: _Piece = one.wanted
            data = memory[piece.start - window.start : piece.stop - window.start]
            check.take(piece, data)
            if not piece.block:
                yield piece.tensor, data
                continue
            words = _words(tensors[piece.tensor].dtype)
            if block is None:
                block = np.empty(piece.block, dtype=words if piece.box else np.uint8)
            if piece.box:
                box = tuple(slice(*one) for one in piece.box)
                block[box] = data.view(words).reshape(block[box].shape)
            else:
                block[piece.at : piece.at + len(data)] = data
            if piece.last:
                whole, block = block, None
                if not piece.box:
                    steps = [one * words.itemsize for one in piece.part.strides or ()]
                    whole = np.ndarray(piece.part.sizes, words, whole, 0, steps)
                    whole = np.ascontiguousarray(whole)
                yield piece.tensor, whole.reshape(-1).view(np.uint8)


def check_fits(tensor: ListedTensor, name: str, memory_bytes: int) -> None:
    """Raise UsageError for a tensor that is stored transposed and does not fit into memory."""
    spans = [part.stop - part.start for part in tensor.parts if part.strides is not None]
    needed = 2 * sum(spans) + prod(tensor.shape) * torch_dtype(tensor.dtype).itemsize
    if spans and needed > memory_bytes:
        raise UsageError(
            f"{name} is not stored row by row, which takes {format_size(needed)} of memory; "
            f"memory is {format_size(memory_bytes)}"
        )
    if spans and len(tensor.parts) > 1:
        raise UsageError(f"{name} is stored in parts that are not row by row")


class _Check:
    """Compares the parts of tensors with their checksums while they are read in order."""

    def __init__(
        self,
        location: FileTree,
        tensors: Sequence[ListedTensor],
        expected: Mapping[_Key, CheckedRange],
    ) -> None:
        self._location, self._tensors, self._expected = location, tensors, expected
        self._running: dict[tuple[int, _Key], RangeCheck] = {}

    def take(self, piece: _Piece, data: Bytes) -> None:
        part = piece.part
        one = self._expected.get(part[:3])
        if one is None:
            return
        key = piece.tensor, part[:3]
        check = self._running.pop(key, None) or RangeCheck(one)
        check.update(data)
        if piece.stop < part.stop:
            self._running[key] = check
        elif check.difference():
            name = self._tensors[piece.tensor].name
            where = self._location.path(part.file)
            raise DataMismatchError(f"{where}: damaged, the checksum of {name} differs")


def _words(dtype: str) -> np.dtype[Any]:
    """Return a dtype of numpy whose values have the size of those of `dtype`."""
    width = torch_dtype(dtype).itemsize
    return np.dtype("c16" if width == 16 else f"u{width}")


def _pieces(tensors: Sequence[ListedTensor], largest: int) -> Iterator[_Piece]:
    for number, tensor in enumerate(tensors):
        parts = [part for part in tensor.parts if part.start < part.stop]
        if not disjoint([_box(part.offsets, part.sizes) for part in parts]):
            raise DataMismatchError(f"{tensor.name}: parts of it overlap")
        width = torch_dtype(tensor.dtype).itemsize
        if not prod(tensor.shape):
            continue
        if parts[0].strides is not None:
            yield from _strided(number, parts[0], largest)
            continue
        for block in _blocks(tensor.shape, max(1, largest // width)):
            yield from _block(number, parts, block, width)


def _strided(number: int, part: TensorPart, largest: int) -> Iterator[_Piece]:
    span = part.stop - part.start
    for at in range(0, span, largest):
        end = min(at + largest, span)
        start, stop = part.start + at, part.start + end
        yield _Piece(number, part, start, stop, (span,), (), at, last=end == span)


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> _Box:
    return tuple((at, at + size) for at, size in zip(offsets, sizes, strict=True))


def _blocks(shape: tuple[int, ...], most: int) -> Iterator[_Box]:
    """Yield boxes of up to `most` elements that follow one another in a tensor, row by row."""
    dim = next((d for d in range(len(shape)) if prod(shape[d + 1 :]) <= most), 0)
    if not shape:
        yield ()
        return
    rows = max(1, most // prod(shape[dim + 1 :]))
    rest = [(0, size) for size in shape[dim + 1 :]]
    for index in product(*map(range, shape[:dim])):
        for at in range(0, shape[dim], rows):
            end = min(at + rows, shape[dim])
            yield (*((one, one + 1) for one in index), (at, end), *rest)


def _block(number: int, parts: Sequence[TensorPart], block: _Box, width: int) -> Iterator[_Piece]:
    """Yield the pieces of a block. What each part has of it is in one piece in the file."""
    found: list[tuple[_Box, TensorPart]] = []
    for part in parts:
        own = _box(part.offsets, part.sizes)
        box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, own, strict=True))
        if all(a < b for a, b in box):
            found.append((box, part))
    found.sort(key=lambda one: one[0])
    cut = next((dim for dim, (a, b) in enumerate(block) if b - a > 1), len(block))
    in_rows = all(box[cut + 1 :] == block[cut + 1 :] for box, _ in found)
    shape = () if in_rows else tuple(b - a for a, b in block)
    for count, (box, part) in enumerate(found, 1):
        first = 0
        for (a, _), offset, size in zip(box, part.offsets, part.sizes, strict=True):
            first = first * size + a - offset
        start = part.start + first * width
        stop = start + prod(b - a for a, b in box) * width
        within = tuple((a - o, b - o) for (a, b), (o, _) in zip(box, block, strict=True))
        yield _Piece(
            number, part, start, stop, shape, () if in_rows else within, 0, count == len(found)
        )


def bytes_of(tensor: ExportTensor, pieces: Iterator[tuple[int, Iterator[Any]]]) -> Iterator[Bytes]:
    """Yield the bytes of the next tensor of grouped `pieces`, in its new dtype."""
    if not tensor.size_bytes:
        return
    kind, target = torch_dtype(tensor.source.dtype), torch_dtype(tensor.dtype)
    for _, data in next(pieces)[1]:
        if kind == target:
            yield data
            continue
        aligned = data.copy() if data.ctypes.data % kind.itemsize else data
        values = tensor_from_bytes(aligned, kind, (len(data) // kind.itemsize,))
        made = values.to(target)
        if target == torch.float16 and bool((made.isinf() & values.isfinite()).any()):
            raise UsageError(f"{tensor.names[0]}: has values too large for fp16; choose bf16")
        yield tensor_bytes(made)
