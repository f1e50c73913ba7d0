"""The arithmetic of torch's zip archives against archives that the installed torch writes."""

from __future__ import annotations

import io
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iobench.workloads import TensorSpec
from iobench.workloads.torch_sizes import (
    archive_bytes,
    dict_pickle_bytes,
    single_tensor_archive_bytes,
    state_dict_archive_bytes,
)

_DTYPES = ["bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "float64"]


class _Counter:
    """A stream that counts what is written to it."""

    size = 0

    def write(self, data: bytes) -> int:
        written = memoryview(data).nbytes
        self.size += written
        return written

    def flush(self) -> None:
        """Nothing to flush."""


def _saved_bytes(value: object) -> int:
    stream = io.BytesIO()
    torch.save(value, stream)
    return len(stream.getvalue())


def test_one_element_costs_1577_bytes_more_than_a_whole_block() -> None:
    """The overhead of a single-tensor archive is 1577 bytes, with the payload padded to 64. It was
    747 bytes before torch 2.1, with fewer records, in an archive named after no file."""
    stream = io.BytesIO()
    torch.save(torch.zeros(1), stream)
    assert len(stream.getvalue()) == 1577
    for shape, size in ((1, 1577), (16, 1641)):
        spec = TensorSpec(name="t", dtype="float32", shape=(shape,))
        assert single_tensor_archive_bytes(spec) == size
    pickled = len(torch._C.PyTorchFileReader(io.BytesIO(stream.getvalue())).get_record("data.pkl"))
    assert archive_bytes(pickled, [4]) == 1577
    assert archive_bytes(pickled, [4], before_2_1=True) == 747


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(_DTYPES),
    shape=st.lists(st.sampled_from([0, 1, 2, 15, 17, 64]), max_size=3),
    wide=st.sampled_from([1, 65535, 65536, 70000]),
)
def test_single_tensor_archives_are_exact(dtype: str, shape: list[int], wide: int) -> None:
    """Every dtype and shape gives the size that torch.save writes, empty tensors included."""
    if prod(shape) * wide < 2**18:
        shape = [*shape, wide]
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    spec = TensorSpec(name="t", dtype=dtype, shape=tuple(shape))
    assert single_tensor_archive_bytes(spec) == _saved_bytes(tensor)


@pytest.mark.parametrize("size", [2**32 - 2, 2**32 - 1, 2**32])
def test_four_gib_takes_zip64_fields(size: int) -> None:
    """Around 4 GiB, where zip64 fields come in, sizes stay exact (memory is never touched)."""
    counter = _Counter()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.empty(size, dtype=torch.uint8), counter)
    finally:
        torch.serialization.set_crc32_options(before)
    spec = TensorSpec(name="t", dtype="uint8", shape=(size,))
    assert single_tensor_archive_bytes(spec) == counter.size


def test_archives_of_many_storages_are_exact_for_their_pickle() -> None:
    """With the pickle's size known, an archive of many records of odd sizes is exact."""
    stream = io.BytesIO()
    state = {f"key{index}": torch.zeros(index, dtype=torch.uint8) for index in range(1, 300)}
    torch.save(state, stream)
    reader = torch._C.PyTorchFileReader(io.BytesIO(stream.getvalue()))
    pickle_bytes = len(reader.get_record("data.pkl"))
    assert archive_bytes(pickle_bytes, range(1, 300)) == len(stream.getvalue())


def test_state_dicts_are_within_a_few_bytes_per_tensor() -> None:
    """The estimated pickle of an AdamW state is within 20 bytes per tensor of torch's."""
    parameters = [torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(50)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros(8, 8)
    optimizer.step()
    state = optimizer.state_dict()
    specs = [
        TensorSpec(name=f"state/{index}/{key}", dtype="float32", shape=tuple(tensor.shape))
        for index, entry in state["state"].items()
        for key, tensor in entry.items()
    ]
    assert state_dict_archive_bytes(specs) == pytest.approx(
        _saved_bytes(state), abs=20 * len(specs)
    )


@pytest.mark.parametrize("count", [0, 1, 2, 40, 999, 1000, 1001])
def test_pickles_of_flat_dicts_are_exact(count: int) -> None:
    """Dicts of tensors of two dtypes and one to four dimensions, before and after 1,000 items."""
    shapes = [(7,), (3, 300), (1, 2, 70000), (1, 2, 3, 4)]
    dtypes = ["bfloat16", "float32"]
    specs = [
        TensorSpec(name=f"layers.{i}.weight", dtype=dtypes[i % 2], shape=shapes[i % 4])
        for i in range(count)
    ]
    state = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in specs}
    stream = io.BytesIO()
    with torch.serialization.skip_data():
        torch.save(state, stream)
    stored = torch._C.PyTorchFileReader(io.BytesIO(stream.getvalue())).get_record("data.pkl")
    assert dict_pickle_bytes(specs) == len(stored)
