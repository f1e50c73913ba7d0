"""Sizes of files: safetensors headers and shards against the safetensors library, byte for byte,
and torch's zip archives against archives that the installed torch writes."""

from __future__ import annotations

import io
from collections.abc import Callable
from math import prod

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iobench.formats.safetensors_header import file_order, file_size, header_bytes
from iobench.workloads import SAFETENSORS_METADATA, FileSpec, TensorSpec, Workload
from iobench.workloads.layouts.huggingface import split_shards
from iobench.workloads.layouts.layout import (
    archive_bytes,
    single_tensor_archive_bytes,
    state_dict_archive_bytes,
)

_NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def _library(tensors: dict[str, torch.Tensor]) -> bytes:
    return safetensors.torch.save(tensors, metadata=SAFETENSORS_METADATA)


def _ours(tensors: dict[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    described = [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    made = header_bytes(described, SAFETENSORS_METADATA)
    for metadata in (SAFETENSORS_METADATA, None):  # a size is known without the header
        header, sizes = header_bytes(described, metadata)
        size = len(header) + sum(sizes.values())
        assert file_size(sorted(described, key=file_order), metadata) == size
    return made


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        _NAMES.filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=6,
    )
)
def test_any_name_and_shape_gives_the_library_s_header(
    described: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    """Quotes, control characters and foreign scripts in names are escaped as in the library."""
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in described.items()}
    header, sizes = _ours(tensors)
    image = _library(tensors)
    assert image[: len(header)] == header
    assert len(image) == len(header) + sum(sizes.values())


@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_a_name_that_is_given_twice_is_refused(dtype: str) -> None:
    """Also if the two tensors are not next to each other in the file."""
    with pytest.raises(ValueError, match="'same' is given twice"):
        header_bytes([("same", "int8", (1,)), ("other", "int8", (1,)), ("same", dtype, (1,))])


def test_shards_have_the_size_and_order_of_real_files(small: Callable[..., Workload]) -> None:
    """Each shard of an export has the size, and the tensor order, of the library's file. A model
    below the shard size is one model.safetensors and no index."""
    workload = small("llama7b-export", max_shard_size=60_000)
    shards = [file for file in workload.files() if file.format == "safetensors"]
    assert len(shards) > 2
    assert shards[0].path == f"model-00001-of-{len(shards):05d}.safetensors"
    for shard in shards:
        _check_against_library(shard)
    paths = [file.path for file in small("llama7b-export").files()]
    assert "model.safetensors" in paths
    assert not [path for path in paths if "index" in path]


def test_the_split_is_greedy_and_large_tensors_stand_alone() -> None:
    """Shards fill up in state dict order; a tensor above the limit gets a shard of its own."""
    tensors = [
        TensorSpec(name=name, dtype="uint8", shape=(size,))
        for name, size in [("a", 4), ("b", 6), ("c", 11), ("d", 1), ("e", 10)]
    ]
    shards = split_shards(tensors, 10)
    names = [[tensor.name for tensor in shard] for shard in shards]
    assert names == [["c"], ["a", "b"], ["d"], ["e"]]  # the large one does not close the shard


def _check_against_library(shard: FileSpec) -> None:
    tensors = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in shard.tensors}
    image = _library(tensors)
    length = int.from_bytes(image[:8], "little")
    places = [image.index(f'"{t.name}"'.encode(), 8, 8 + length) for t in shard.tensors]
    assert shard.size_bytes == len(image)
    assert places == sorted(places)


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
