"""A DCP file laid out here is a row of torch.save's files, whatever the tensors are."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from iobench.formats import dcp_file
from iobench.formats.dcp_file import ALIGNMENT, DcpFile
from iobench.formats.tensors import tensor_bytes
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.image import FileImage

_shapes = st.lists(st.integers(0, 5), max_size=3)
_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
_tensors = st.lists(st.tuples(_dtypes, _shapes), max_size=6)


def _saved(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def _taken(image: FileImage, step: int) -> bytes:
    """Return the bytes of an image, taken in ranges of `step` from its end on."""
    found = b""
    for stop in range(image.size_bytes, 0, -step):
        views = image.views(max(0, stop - step), stop)
        found = b"".join(view.tobytes() for view in views) + found
    return found


@given(
    kinds=_tensors,
    end=st.binary(max_size=9),
    step=st.integers(50, 5000),
    group=st.sampled_from([1, 3000, 1 << 24]),
)
def test_the_file_is_a_row_of_torchs_files(
    kinds: list[tuple[torch.dtype, list[int]]], end: bytes, step: int, group: int
) -> None:
    """From the trainer's memory and from a copy in a slot: the same bytes, with checksums."""
    with mock.patch.object(dcp_file, "_GROUP", group):
        _compare(kinds, end, step)


def _compare(kinds: list[tuple[torch.dtype, list[int]]], end: bytes, step: int) -> None:
    tensors = [
        torch.arange(int(np.prod(shape, dtype=int))).to(dtype).reshape(shape)
        for dtype, shape in kinds
    ]
    file = DcpFile([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
    stored = [tensor for tensor in tensors if tensor.numel()]
    data = [tensor_bytes(tensor) for tensor in stored]
    addresses = np.array([tensor.data_ptr() for tensor in stored], dtype=np.int64)
    image = file.image_of("f", data, checked=True, end=end)
    whole = _taken(image, step)
    assert len(whole) == file.size_bytes + len(end)
    assert whole.endswith(end)
    for tensor, item in zip(tensors, file.items, strict=True):
        assert whole[item.start : item.start + item.length] == _saved(tensor)
        assert item.start % ALIGNMENT == 0
    sample = file.image("f", addresses, {}, tensors)
    slot = np.full(file.size_bytes + 3, 7, dtype=np.uint8)
    sample.gather(0, file.size_bytes, slot)
    assert _taken(file.image_in("f", slot, end), step) == whole
    assert slot[: file.size_bytes].tobytes() == whole[: file.size_bytes]
    assert slot[file.size_bytes :].tolist() == [7, 7, 7]


def _file(tensors: list[torch.Tensor]) -> tuple[DcpFile, Callable[[], FileImage]]:
    """The file of tensors, and what makes an image of it."""
    file = DcpFile([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
    data = [tensor_bytes(tensor) for tensor in tensors]
    return file, lambda: file.image_of("f", data, checked=True)


def test_the_end_of_a_file_needs_no_checksum_of_its_begin() -> None:
    """Those of other groups are computed when they are taken: no thread waits for them before."""
    tensors = [torch.zeros(1000), torch.ones(1000)]
    file, image_of = _file(tensors)
    with mock.patch.object(dcp_file, "_GROUP", 1):
        groups = image_of()
    last = file.items[1]
    for one, later in ((groups, True), (image_of(), False)):
        tensors[0].zero_()
        one.views(last.start, one.size_bytes)
        tensors[0].add_(1)
        found = b"".join(view.tobytes() for view in one.views(0, last.start))
        assert (found[: file.items[0].length] == _saved(tensors[0])) is later


def test_threads_take_ranges_in_any_order() -> None:
    """The checksums of a range are there when it is taken, whoever computes them."""
    tensors = [torch.full((300 * (1 + number % 3),), float(number)) for number in range(40)]
    file, image_of = _file(tensors)
    image = image_of()
    starts = list(range(0, image.size_bytes, 777))
    random.Random(1).shuffle(starts)
    found: dict[int, bytes] = {}

    def take(start: int) -> None:
        views = image.views(start, min(start + 777, image.size_bytes))
        found[start] = b"".join(view.tobytes() for view in views)

    map_in_workers(8, take, starts)
    whole = b"".join(found[start] for start in sorted(found))
    for tensor, item in zip(tensors, file.items, strict=True):
        assert whole[item.start : item.start + item.length] == _saved(tensor)
