"""The file of one tensor is torch's, byte for byte, and every byte of it is compared by a load."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib
from torch.utils.serialization import config

from iobench.formats import dcp_file, torch_image
from iobench.formats.tensors import tensor_bytes
from iobench.formats.torch_image import crc32_setting

_DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64),
    *(torch.int16, torch.uint16, torch.float64),
]


def _saved(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def _made(tensor: torch.Tensor) -> bytes | None:
    plain = dcp_file.plain(tensor)
    if plain is None or plain.data_ptr() != tensor.data_ptr() or not plain.numel():
        return None
    made = dcp_file.template(plain.dtype, tuple(plain.shape), dcp_file.settings())
    assert made is not None
    data = tensor_bytes(plain)
    return made.head + data.tobytes() + made.tail(isal_zlib.crc32(data))


def _random(dtype: torch.dtype, shape: list[int], order: int, seed: int) -> torch.Tensor:
    """Return a tensor whose dimensions are in any order in memory."""
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2, size, np.uint8)
    flat = torch.from_numpy(data).view(dtype) if size else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    turned = [tensor, tensor.T if tensor.ndim == 2 else tensor, tensor.movedim(0, -1)]
    return turned[order]


_shapes = st.lists(st.integers(0, 9), min_size=1, max_size=4)
_tensors = st.builds(
    _random, st.sampled_from(_DTYPES), _shapes, st.integers(0, 2), st.integers(0, 99)
)


@given(tensor=_tensors, crc=st.booleans())
def test_any_tensor(tensor: torch.Tensor, crc: bool) -> None:
    """The same bytes for any dtype and shape, and the same tensor from these bytes. Other strides
    than the usual ones, of dimensions of length 1, are not stored."""
    shape = tuple(tensor.shape)
    usual = tensor.numel() and tensor.stride() == torch.empty(shape).stride()
    with crc32_setting(crc):
        made, stock = _made(tensor), _saved(tensor)
        assert made == stock or not usual
        file = np.frombuffer(bytearray(stock), dtype=np.uint8)
        found = dcp_file.view(file, tensor.dtype, shape, dcp_file.settings())
    assert (found is not None) == bool(usual)
    if made is not None:
        again = torch.load(io.BytesIO(made))
        assert again.shape == tensor.shape
        assert np.array_equal(tensor_bytes(again), tensor_bytes(tensor))
    if found is not None:
        assert found.shape == tensor.shape
        assert found.view(torch.uint8).equal(tensor.contiguous().view(torch.uint8))


class _Own(torch.Tensor):
    """A subclass, which torch pickles with its name."""


_ODD: dict[str, Callable[[], torch.Tensor]] = {
    "a subclass": lambda: torch.ones(3).as_subclass(_Own),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.parametrize("name", _ODD)
@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")
@pytest.mark.filterwarnings("ignore:.*beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:.*are deprecated and will be removed:UserWarning")
def test_torch_makes_the_file_of_another_tensor(name: str) -> None:
    assert _made(_ODD[name]()) is None


def test_a_scalar_and_torchs_settings() -> None:
    """A scalar has no dimension at all. Another alignment of the storages makes another file."""
    scalar = torch.tensor(3.5, dtype=torch.float64)
    stock = _saved(scalar)
    assert _made(scalar) == stock
    file = np.frombuffer(bytearray(stock), dtype=np.uint8)
    found = dcp_file.view(file, scalar.dtype, (), dcp_file.settings())
    assert found is not None
    assert found.equal(scalar)
    tensor = torch.arange(100)
    first = _made(tensor)
    with config.patch("save.storage_alignment", 4096):
        second = _made(tensor)
        assert second == _saved(tensor)
    assert first != second
    assert first == _made(tensor) == _saved(tensor)


def test_a_file_of_another_kind_has_no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that combines checksums in another way writes its files itself."""
    monkeypatch.setattr(torch_image, "hash_combine", lambda seed, _: seed)
    cached = torch_image.is_like_stock, dcp_file.template
    for one in cached:
        one.cache_clear()
    try:
        assert _made(torch.arange(17)) is None
    finally:
        for one in cached:
            one.cache_clear()


_STOCK = _saved(torch.arange(40.0).reshape(5, 8))


@given(at=st.integers(0, len(_STOCK) - 1), change=st.integers(1, 255))
def test_no_damaged_byte_is_passed_over(at: int, change: int) -> None:
    """In the data, which the file has a checksum of, or anywhere else."""
    file = np.frombuffer(bytearray(_STOCK), dtype=np.uint8)
    found = dcp_file.settings()
    assert dcp_file.view(file, torch.float32, (5, 8), found) is not None
    file[at] ^= change
    assert dcp_file.view(file, torch.float32, (5, 8), found) is None


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float32, (8, 5)), (torch.int32, (5, 8)), (torch.float32, (40,)), (torch.bool, (2,))],
)
def test_another_tensor_than_expected(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    file = np.frombuffer(bytearray(_STOCK), dtype=np.uint8)
    assert dcp_file.view(file, dtype, shape, dcp_file.settings()) is None
    assert dcp_file.view(file[:-1], torch.float32, (5, 8), dcp_file.settings()) is None
    assert dcp_file.view(file[:9], torch.float32, (5, 8), dcp_file.settings()) is None


@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (1000, 700)),
        (torch.bfloat16, (1, 2**20, 1)),
        (torch.uint8, (2**20 + 1,)),
        (torch.float64, (3,)),
    ],
)
def test_a_template_of_any_size(dtype: torch.dtype, shape: tuple[int, ...], crc: bool) -> None:
    """Head and tail of large tensors too are those of torch's file, for any data."""
    tensor = _random(dtype, list(shape), 0, 1)
    with crc32_setting(crc):
        stock = _saved(tensor)
        made = dcp_file.template(dtype, shape, dcp_file.settings())
    assert made is not None
    data = stock[len(made.head) : len(made.head) + made.size_bytes]
    whole = made.head + data + bytes(made.tail(isal_zlib.crc32(data)))
    assert whole == stock
    assert made.size_bytes + len(made.text) == len(stock)
