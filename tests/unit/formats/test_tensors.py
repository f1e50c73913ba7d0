"""Between torch tensors and plain bytes."""

from __future__ import annotations

import pytest
import torch

from iobench.errors import UsageError
from iobench.formats.tensors import (
    allocate,
    dtype_name,
    tensor_bytes,
    tensor_from_bytes,
    torch_dtype,
)


def test_bytes() -> None:
    """The bytes of a contiguous tensor are its own memory, not a copy; one of a single value is
    contiguous whatever its stride says. Lazily conjugated and negated tensors give the bytes of
    what they stand for."""
    tensor = torch.zeros(3, dtype=torch.int32)
    tensor_bytes(tensor)[4] = 1
    assert tensor.tolist() == [0, 1, 0]
    single = torch.arange(64, dtype=torch.int16)[60::4]
    assert single.stride() == (4,)
    assert tensor_bytes(single).tolist() == [60, 0]
    conjugated = torch.tensor([1 + 2j, 3 - 4j]).conj()
    negated = conjugated.imag
    assert negated.is_neg()
    for lazy in (conjugated, negated):
        assert tensor_bytes(lazy).tobytes() == tensor_bytes(lazy.clone().contiguous()).tobytes()


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.ones(2, device="meta")])
def test_no_bytes(tensor: torch.Tensor) -> None:
    """A tensor without dense CPU memory is refused, with what to do."""
    with pytest.raises(UsageError, match=r"call \.cpu\(\) or \.to_dense\(\) first"):
        tensor_bytes(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (), (0, 4), (1,) * 40])
def test_several_in_one_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Each tensor has its own part of the memory, and its own storage of that size."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = allocate(3 * size)
    memory[:] = 1
    tensors = [tensor_from_bytes(memory, dtype, shape, at * size) for at in range(3)]
    assert [(t.dtype, t.shape) for t in tensors] == [(dtype, shape)] * 3
    assert [t.untyped_storage().nbytes() for t in tensors] == [size] * 3
    tensors[1].zero_()
    assert memory.tolist() == [1] * size + [0] * size + [1] * size


def test_dtype_names() -> None:
    """Names and dtypes map to each other; a name that is no dtype is refused."""
    assert torch_dtype(dtype_name(torch.float8_e5m2)) is torch.float8_e5m2
    with pytest.raises(UsageError, match="'Tensor'"):
        torch_dtype("Tensor")
