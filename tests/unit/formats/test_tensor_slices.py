"""CutImage: slices of tensors are copied out of the blocks of a file, whatever blocks they are."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from iobench.formats.tensor_slices import CutImage, CutPart, rows_of, spans
from iobench.formats.tensors import tensor_bytes
from iobench.writers.image import Bytes
from iobench.writers.transfer import Meter

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
