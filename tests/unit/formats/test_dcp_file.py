"""A DCP file laid out here is a row of torch.save's files, whatever the tensors are."""

from __future__ import annotations

import io

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from iobench.formats.dcp_file import ALIGNMENT, DcpFile
from iobench.formats.tensors import tensor_bytes

_shapes = st.lists(st.integers(0, 5), max_size=3)
_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
_tensors = st.lists(st.tuples(_dtypes, _shapes), max_size=6)


def _saved(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


@given(kinds=_tensors, end=st.binary(max_size=9))
def test_the_file_is_a_row_of_torchs_files(
    kinds: list[tuple[torch.dtype, list[int]]], end: bytes
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
    image = file.image("f", file.text(data), addresses, {}, tensors, end=end)
    whole = b"".join(view.tobytes() for view in image.views(0, image.size_bytes))
    assert len(whole) == file.size_bytes + len(end)
    assert whole.endswith(end)
    for tensor, item in zip(tensors, file.items, strict=True):
        assert whole[item.start : item.start + item.length] == _saved(tensor)
        assert item.start % ALIGNMENT == 0
    sample = file.image("f", file.sample, addresses, {}, tensors)
    slot = np.full(file.size_bytes + 3, 7, dtype=np.uint8)
    sample.gather(0, file.size_bytes, slot)
    file.put_checksums(slot)
    assert slot[: file.size_bytes].tobytes() == whole[: file.size_bytes]
    assert slot[file.size_bytes :].tolist() == [7, 7, 7]
