"""Between torch tensors and plain bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from iobench.errors import UsageError
from iobench.writers.device.base import DeviceBytes
from iobench.writers.image import Bytes, Memory

__all__ = [
    "Allocate",
    "OnDevice",
    "allocate",
    "allocate_on",
    "device_bytes",
    "dtype_name",
    "flat_tensor",
    "resolved",
    "tensor_bytes",
    "tensor_from_bytes",
    "tensor_memory",
    "torch_dtype",
]

Allocate = Callable[[int], Memory]
"""Gives writable memory of that many bytes, uint8 and one-dimensional, 64-byte aligned."""


def allocate(size_bytes: int) -> Bytes:
    """Fresh memory from torch's own allocator."""
    return torch.empty(size_bytes, dtype=torch.uint8).numpy()


@dataclass(frozen=True)
class OnDevice:
    """Allocates on a CUDA device, from torch's own allocator."""

    device: torch.device

    def __call__(self, size_bytes: int) -> DeviceBytes:
        return device_bytes(torch.empty(size_bytes, dtype=torch.uint8, device=self.device))


def allocate_on(device: str | torch.device) -> Allocate | None:
    """What allocates on `device`; None for the CPU.

    Raises UsageError for a device that is none of CUDA's, or that this torch does not see.
    """
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is none that torch knows") from error
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        raise UsageError(f"device {device!r}: files are restored to cpu or cuda devices")
    if not torch.cuda.is_available() or (wanted.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {device!r}: torch {torch.__version__} sees no such CUDA device")
    return OnDevice(wanted)


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """The tensor's bytes as a view; a copy only when the tensor is not contiguous.

    The view keeps the memory alive. Raises UsageError for a tensor that is not dense CPU memory.
    """
    flat: Any = _flat(tensor, here=tensor.is_cpu).numpy()
    view: Bytes = flat
    return view


def tensor_memory(tensor: torch.Tensor) -> Memory:
    """`tensor_bytes`, of a tensor on a CUDA device too: its memory there, as an image takes it."""
    if tensor.device.type != "cuda":
        return tensor_bytes(tensor)
    return device_bytes(_flat(tensor, here=True))


def device_bytes(flat: torch.Tensor) -> DeviceBytes:
    """One dimension of uint8 on a CUDA device as memory of an image."""
    from iobench.writers.device.cuda import CudaBytes

    return CudaBytes(flat)


def _flat(tensor: torch.Tensor, *, here: bool) -> torch.Tensor:
    """The tensor's bytes where they are, as uint8 of one dimension; `here`: that can be used."""
    if not here or tensor.layout != torch.strided:
        raise UsageError(
            f"a tensor of layout {tensor.layout} on {tensor.device} has no bytes here; "
            "move it by .cpu() or make it dense first"
        )
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    dense = resolved(tensor).contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` apart from autograd, its memory holding what it shows: no lazy conj or negation."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        return plain.resolve_conj().resolve_neg()
    return plain


def tensor_from_bytes(data: Memory, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor on the memory `data`, which has just the bytes that dtype and shape need."""
    flat = flat_tensor(data)
    if not len(data):
        # Not torch.empty(shape): it refuses shapes that reshape takes, and safetensors with it.
        return torch.empty(0, dtype=dtype, device=flat.device).reshape(shape)
    return flat.view(dtype).reshape(shape)


def flat_tensor(data: Memory) -> torch.Tensor:
    """The memory `data` as a tensor of uint8, where it is."""
    if isinstance(data, DeviceBytes):
        flat: torch.Tensor = data.tensor
        return flat
    return torch.from_numpy(data)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """torch.float32 for `float32`. Raises UsageError for no dtype of this torch."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return found
