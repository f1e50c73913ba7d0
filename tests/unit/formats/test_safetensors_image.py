"""Images of safetensors files: their bytes are those of the library."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import UsageError
from iobench.formats.safetensors import image

_SQUARE = torch.randn(4, 6)
_COMPLEX = torch.randn(6, dtype=torch.complex64)
_TENSORS = [
    _SQUARE,
    _SQUARE.clone(),
    _SQUARE.t().contiguous().t(),
    _SQUARE.reshape(6, 4),
    _SQUARE.t().reshape(4, 6),
    _SQUARE[:, ::2],
    torch._neg_view(_SQUARE),
    _SQUARE.double(),
    _SQUARE.view(torch.int32),
    torch.nn.Parameter(_SQUARE),
    _COMPLEX,
    _COMPLEX.conj(),
    torch.empty(0, 3),
    torch.tensor(1.5),
    _SQUARE.new_ones(1).expand(3, 2),
]
_FILES = st.dictionaries(
    st.sampled_from(["a", "b", "ä", "layers.10", "layers.9"]), st.sampled_from(range(len(_TENSORS)))
)


def _bytes(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    made = image("f", tensors, metadata)
    block = np.zeros(made.size_bytes, dtype=np.uint8)
    made.gather(0, made.size_bytes, block)
    return block.tobytes()


def _of_library(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> bytes:
    plain = {
        name: tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
        for name, tensor in tensors.items()
    }
    return safetensors.torch.save(plain, metadata)


@given(st.lists(st.tuples(_FILES, st.sampled_from([None, {"a": "1"}, {"a": "2"}])), max_size=8))
def test_the_bytes_of_the_library(
    files: list[tuple[dict[str, int], dict[str, str] | None]],
) -> None:
    """Of any names, shapes, dtypes, strides and metadata."""
    for numbers, metadata in files:
        tensors = {name: _TENSORS[number] for name, number in numbers.items()}
        assert _bytes(tensors, metadata) == _of_library(tensors, metadata)


@pytest.mark.parametrize("name", ["__metadata__", 1])
def test_refused_as_ever(name: str) -> None:
    """What the format cannot hold is the caller's error, also after a good file."""
    good, bad = {"w": torch.ones(3)}, {name: torch.ones(3)}
    _bytes(good)
    for tensors in (bad, {"w": torch.ones(3).to_sparse()}, {"w": torch.ones(3, device="meta")}):
        with pytest.raises(UsageError):
            image("f", tensors)
    with pytest.raises(UsageError, match="must be relative"):
        image("/f", good)


def test_a_tensor_that_lost_its_memory() -> None:
    """No byte after the end of a storage is read."""
    weight = torch.ones(100)
    _bytes({"w": weight})
    weight.untyped_storage().resize_(8)
    with pytest.raises(RuntimeError, match="out of bounds"):
        image("f", {"w": weight})
