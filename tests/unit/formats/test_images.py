"""Images of files. CheckedImage: checksums are right and at their places, for any order of the
bytes. WindowImage: a part of a file.
CutImage: slices of tensors are copied out of the blocks of a file, whatever blocks they are."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import UsageError
from iobench.formats.many_parts import CheckedImage, RunningChecksums, WindowImage
from iobench.formats.tensor_slices import CutImage, CutPart, rows_of, spans
from iobench.formats.tensors import tensor_bytes
from iobench.writers.image import Bytes, FileImage
from iobench.writers.transfer import Meter

_HEAD, _CRC, _TAIL = 3, 4, 5  # bytes before a part, of a checksum behind it, of the end


class File:
    """Parts with four bytes for a checksum after each, and five at the end for all of them."""

    def __init__(self, lengths: list[int]) -> None:
        rng = np.random.default_rng(len(lengths))
        self.parts: dict[int, np.ndarray] = {}
        self.texts: dict[int, bytearray] = {}
        self.finished = 0
        position = 0
        memories: list[Any] = []
        for length in lengths:
            head, part = bytearray(_HEAD), rng.integers(0, 256, length, np.uint8)
            position += _HEAD
            self.parts[position] = part
            self.texts[position] = bytearray(_CRC)
            position += length + _CRC
            memories += [head, part, self.texts[position - length - _CRC]]
        self.tail = bytearray(_TAIL)
        checksums = RunningChecksums(self.parts, self.put, self.finish)
        parts = [np.frombuffer(memory, dtype=np.uint8) for memory in [*memories, self.tail]]
        self.image = CheckedImage("file", parts, {0: checksums})
        self.wanted = (
            b"".join(
                bytes(_HEAD) + part.tobytes() + zlib.crc32(part).to_bytes(_CRC, "little")
                for part in self.parts.values()
            )
            + b"whole"
        )

    def put(self, start: int, checksum: int) -> None:
        assert not any(self.texts[start])  # once
        self.texts[start][:] = checksum.to_bytes(_CRC, "little")

    def finish(self, checksums: object) -> None:
        assert checksums == {start: zlib.crc32(part) for start, part in self.parts.items()}
        self.tail[:] = b"whole"
        self.finished += 1

    def take(self, start: int, stop: int) -> bytes:
        return b"".join(view.tobytes() for view in self.image.views(start, stop))


_LENGTHS = st.lists(st.integers(0, 40), max_size=6)


@given(_LENGTHS, st.data())
def test_in_any_order(lengths: list[int], data: st.DataObject) -> None:
    """The bytes are those of the finished file, and no checksum is computed twice."""
    file = File(lengths)
    size = file.image.size_bytes
    cuts = data.draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)), max_size=8))
    for one, other in cuts:
        start, stop = sorted((one, other))
        assert file.take(start, stop) == file.wanted[start:stop]
    assert file.take(0, size) == file.wanted
    assert file.take(0, size) == file.wanted
    assert file.finished == 1


def test_nothing_is_computed_before_it_is_needed() -> None:
    """The first access to a byte behind a part inserts its checksum."""
    file = File([100, 100])
    file.take(0, _HEAD + 99)
    assert not any(any(text) for text in file.texts.values())
    file.take(_HEAD + 100, _HEAD + 101)
    assert [any(text) for text in file.texts.values()] == [True, False]


def test_what_is_refused() -> None:
    """A path that is not relative, and bytes that are not in memory; those of a window can be read
    up to the end of the file."""
    with pytest.raises(UsageError, match="relative"):
        FileImage.of_parts("/f", [])
    parts, frozen = FileImage.of_parts("f", [np.zeros(3, np.uint8)]), np.zeros(3, np.uint8)
    frozen.flags.writeable = False
    assert parts.writable
    assert not FileImage.of_parts("f", [np.zeros(1, np.uint8), frozen]).writable
    memory = np.arange(8, dtype=np.uint8)
    image = WindowImage("f", 20, 14, memory)
    assert (image.size_bytes, image.writable, image.in_one_piece(15, 20)) == (20, True, True)
    assert [view.tolist() for view in image.views(15, 20)] == [[1, 2, 3, 4, 5]]
    assert [(at, part.tolist()) for at, part in image.parts()] == [(14, [0, 1, 2, 3, 4, 5])]
    early = WindowImage("f", 20, 2, memory)
    for one, start, stop in (
        *((parts, 0, 4), (image, 13, 15), (image, 0, 20), (image, 14, 21), (early, 3, 11)),
    ):
        with pytest.raises(IndexError):
            one.views(start, stop)


_DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex128]


@st.composite
def _slices(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[slice, ...]]:
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    dtype = draw(st.sampled_from(_DTYPES))
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    index = tuple(slice(low, high, draw(st.integers(1, 3))) for low, high in bounds)
    data = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 256, 16 * 7**4, np.uint8)
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(data[:count]).view(dtype).reshape(shape), index


@given(
    st.lists(_slices(), min_size=1, max_size=4),
    st.integers(1, 200),
    st.integers(0, 20),
    st.randoms(use_true_random=False),
)
def test_any_slices_in_any_blocks(
    tensors: list[tuple[torch.Tensor, tuple[slice, ...]]],
    block_size: int,
    gap: int,
    order: random.Random,
) -> None:
    """Blocks that cut rows and elements, and have several tensors and gaps, in any order."""
    file, cuts, found = bytearray(), list[CutPart](), list[torch.Tensor]()
    for whole, index in tensors:
        file += bytes(gap)
        view = whole[index]
        found.append(torch.zeros(view.shape, dtype=view.dtype))
        some = spans(view)
        rows = rows_of(found[-1], some)
        cuts += [CutPart(len(file), span, row) for span, row in zip(some, rows, strict=True)]
        file += _bytes(whole)
    data = np.frombuffer(bytes(file), np.uint8)
    image = CutImage("file", len(data), cuts)
    blocks = [
        (at, min(at + block_size, stop))
        for start, stop in image.ranges
        for at in range(start, stop, block_size)
    ]
    order.shuffle(blocks)
    for start, stop in blocks:
        _fill(image, start, stop, data[start:stop], by_views=order.random() < 0.5)
    for (whole, index), one in zip(tensors, found, strict=True):
        assert _bytes(one) == _bytes(whole[index])


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor_bytes(tensor).tobytes()


def _fill(image: CutImage, start: int, stop: int, data: Bytes, *, by_views: bool) -> None:
    """Like a writer that reads into a block of its own, or into what the image provides."""
    if not by_views:
        assert image.scatter(start, stop, data) == stop - start
        return
    with image.incoming(start, stop, Meter()) as views:
        assert sum(map(len, views)) == stop - start
        at = 0
        for view in views:
            view[:] = data[at : at + len(view)]
            at += len(view)
