"""Between torch tensors and plain bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from iobench.errors import UsageError
from iobench.writers.image import Bytes

__all__ = ["Allocate", "allocate", "dtype_name", "tensor_bytes", "tensor_from_bytes", "torch_dtype"]

Allocate = Callable[[int], Bytes]
"""Gives writable memory of that many bytes, uint8 and one-dimensional, 64-byte aligned."""


def allocate(size_bytes: int) -> Bytes:
    """Fresh memory from torch's own allocator."""
    return torch.empty(size_bytes, dtype=torch.uint8).numpy()


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """The tensor's bytes as a view; a copy only when the tensor is not contiguous.

    The view keeps the memory alive. Raises UsageError for a tensor that is not dense CPU memory.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise UsageError(
            f"a tensor of layout {tensor.layout} on {tensor.device} has no bytes here; "
            "move it by .cpu() or make it dense first"
        )
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not dense.numel():
        return np.empty(0, dtype=np.uint8)
    flat: Any = dense.reshape(-1).view(torch.uint8).numpy()
    view: Bytes = flat
    return view


def tensor_from_bytes(data: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor on the memory `data`, which has just the bytes that dtype and shape need."""
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """torch.float32 for `float32`. Raises UsageError for no dtype of this torch."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return found
