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
from iobench.testing import content


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


_DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", [name for name in _DTYPES if hasattr(torch, name)])
def test_every_dtype(name: str) -> None:
    """A vector, a scalar and an empty tensor of every dtype are their bytes, and made of them."""
    dtype = getattr(torch, name)
    raw = content(1237 * dtype.itemsize)
    if name == "bool":
        raw &= 1
    vector = torch.from_numpy(raw.copy()).view(dtype)
    assert tensor_bytes(vector).tobytes() == raw.tobytes()
    assert (
        tensor_bytes(vector[5].clone()).tobytes()
        == raw[5 * dtype.itemsize :][: dtype.itemsize].tobytes()
    )
    assert tensor_bytes(vector[:0]).tobytes() == b""
    for view in (vector, vector[5], vector[:0]):
        back = tensor_from_bytes(tensor_bytes(view.clone()), dtype, view.shape)
        assert (back.dtype, back.shape) == (dtype, view.shape)
        assert tensor_bytes(back).tobytes() == tensor_bytes(view).tobytes()


_BASE = torch.arange(6 * 8 * 10).to(torch.bfloat16).reshape(6, 8, 10)
_COMPLEX = torch.complex(torch.arange(60.0), torch.arange(60.0) + 100).reshape(6, 10)


@pytest.mark.parametrize(
    "view",
    [
        _BASE.transpose(0, 2),
        _BASE[::2, :, 1::3],
        _BASE[:1, :, :1].expand(5, 8, 7),
        _BASE[None].to(memory_format=torch.channels_last),
        torch.from_numpy(content(15_000)).reshape(5000, 3)[:, 1],
        _COMPLEX.conj().t(),
        _COMPLEX.conj().imag,
    ],
    ids=["transposed", "every other", "expanded", "channels last", "column", "conj", "neg"],
)
def test_not_contiguous(view: torch.Tensor) -> None:
    """The bytes are those of the values, in the order of the indices."""
    values = torch.tensor(view.tolist(), dtype=view.dtype)
    assert tensor_bytes(view).tobytes() == tensor_bytes(values).tobytes()


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
