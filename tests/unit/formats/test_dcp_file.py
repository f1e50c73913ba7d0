"""A DCP file laid out here is a row of torch.save's files, whatever the tensors are."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fake_device import FakeDevice

from iobench.formats.dcp_file import ALIGNMENT, DcpFile
from iobench.formats.tensors import tensor_bytes
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.device.staging import staged
from iobench.writers.image import FileImage
from iobench.writers.transfer import Meter

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
)
def test_the_file_is_a_row_of_torchs_files(
    kinds: list[tuple[torch.dtype, list[int]]], end: bytes, step: int
) -> None:
    """From the trainer's memory and from a copy in a slot: the same bytes, with checksums."""
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


def test_threads_take_ranges_in_any_order() -> None:
    """The checksums of a range are there when it is taken, whoever computes them."""
    tensors = [torch.full((300 * (1 + number % 3),), float(number)) for number in range(40)]
    file = DcpFile([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
    image = file.image_of("f", [tensor_bytes(tensor) for tensor in tensors], checked=True)
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


@pytest.mark.parametrize("first", ["the checksums", "the writer"])
def test_from_a_device(first: str) -> None:
    """The CRC32s are there for whoever takes the bytes: the writer, or the manifest's checksums."""
    tensors = [torch.full((3000 + number,), float(number)) for number in range(40)]
    file, device = DcpFile([(one.dtype, tuple(one.shape)) for one in tensors]), FakeDevice()
    image = file.image_of("f", [device.upload(tensor_bytes(one)) for one in tensors], checked=True)
    with staged(image, Meter()) as on_host:
        takes = [
            lambda: b"".join(one.tobytes() for one in on_host.host_bytes(0, image.size_bytes)),
            lambda: _gathered(on_host),
        ]
        found = [take() for take in (takes if first == "the checksums" else takes[::-1])]
    for whole in found:
        for tensor, item in zip(tensors, file.items, strict=True):
            assert whole[item.start : item.start + item.length] == _saved(tensor)


def _gathered(image: FileImage) -> bytes:
    """Take the blocks from the last one on."""
    room, starts = np.empty(image.size_bytes, dtype=np.uint8), range(0, image.size_bytes, 7000)
    for start in reversed(starts):
        image.gather(start, min(start + 7000, image.size_bytes), room[start:])
    return room.tobytes()
