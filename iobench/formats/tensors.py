"""Conversion between torch tensors and plain bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from iobench import linux
from iobench.errors import UsageError
from iobench.writers.device.cuda import (
    device_bytes,
    flat_tensor,
    resolved,
    tensor_bytes,
    tensor_memory,
)
from iobench.writers.image import AnyMemory, Bytes, DeviceBytes

__all__ = [
    "Allocate",
    "OnDevice",
    "allocate",
    "allocate_on",
    "array_dtype",
    "device_bytes",
    "dtype_name",
    "flat_tensor",
    "resolved",
    "storages_bytes",
    "tensor_bytes",
    "tensor_from_bytes",
    "tensor_memory",
    "torch_dtype",
]

_MOST_DIMENSIONS = 32
"""Of an array of numpy before 2.0."""

Allocate = Callable[[int], AnyMemory]
"""Returns writable memory of so many bytes: uint8, one-dimensional, 64-byte aligned."""


def allocate(size_bytes: int) -> Bytes:
    """Return new memory from torch's own allocator."""
    return torch.empty(size_bytes, dtype=torch.uint8).numpy()


@dataclass(frozen=True)
class OnDevice:
    """Allocates on a CUDA device, from torch's own allocator."""

    device: torch.device

    def __call__(self, size_bytes: int) -> DeviceBytes:
        return device_bytes(torch.empty(size_bytes, dtype=torch.uint8, device=self.device))


def allocate_on(device: str | torch.device) -> Allocate | None:
    """Return the allocator of `device`; None for the CPU.

    Raises UsageError for a device that is neither CPU nor CUDA, or that this torch does not see.
    """
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r}: unknown to torch; choose cpu or cuda") from error
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        raise UsageError(f"device {device!r}: files are restored to cpu or cuda; choose one")
    if not torch.cuda.is_available() or (wanted.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {device!r}: torch {torch.__version__} sees no such CUDA device")
    return OnDevice(wanted)


def storages_bytes(storages: Sequence[torch.UntypedStorage]) -> list[Bytes]:
    """Return the bytes of each storage in host memory, in views that keep them all. None is empty.

    The views are parts of one array over all addresses between the first and the last. An array of
    its own takes ten times as long for each, and `Tensor.numpy` makes a storage unresizable.
    """
    if not storages:
        return []
    addresses = [storage.data_ptr() for storage in storages]
    stops = [address + s.nbytes() for address, s in zip(addresses, storages, strict=True)]
    first = min(addresses)
    whole = np.asarray(linux.MemorySpan(first, max(stops) - first, storages))
    return [whole[a - first : b - first] for a, b in zip(addresses, stops, strict=True)]


def tensor_from_bytes(
    data: AnyMemory, dtype: torch.dtype, shape: Sequence[int], start: int = 0
) -> torch.Tensor:
    """Return a tensor on the memory `data` from `start` on; dtype and shape say how much of it.

    It has its own storage, which is as long as the tensor.
    """
    if 0 in shape:
        # Not torch.empty(shape): it refuses shapes that reshape and safetensors accept.
        return torch.empty(0, dtype=dtype, device=flat_tensor(data).device).reshape(shape)
    if not isinstance(data, np.ndarray):
        return flat_tensor(data)[start:].view(dtype).reshape(shape)
    if len(shape) > _MOST_DIMENSIONS:
        return tensor_from_bytes(data, dtype, (prod(shape),), start).view(shape)
    # From numpy in the right shape: torch.frombuffer and a view of it take twice as long, which is
    # most of the time of many small tensors.
    values, same = _numpy_type(dtype)
    made = torch.from_numpy(np.ndarray(shape, values, data, start))
    return made if same else made.view(dtype)


def array_dtype(dtype: torch.dtype, shape: Sequence[int]) -> np.dtype[Any] | None:
    """Return the dtype of a numpy array that is a tensor of `dtype` and `shape` for torch.

    None if numpy lacks the dtype, or has no such array.
    """
    if 0 in shape or len(shape) > _MOST_DIMENSIONS:
        return None
    values, same = _numpy_type(dtype)
    return values if same else None


@functools.cache
def _numpy_type(dtype: torch.dtype) -> tuple[np.dtype[Any], bool]:
    """Return numpy's dtype, or that of integers of the same size, and whether values are equal."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype, True
    except TypeError:  # numpy has no bfloat16 and no float8
        return np.dtype(f"u{dtype.itemsize}"), False


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name such as `float32`. Raises UsageError if torch lacks it."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return found
