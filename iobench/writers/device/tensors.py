"""The bytes of torch tensors, without a copy. Imported with the first tensor, as it loads torch."""

from __future__ import annotations

from typing import Any

import torch

from iobench.errors import UsageError
from iobench.writers.blocks.pages import Bytes
from iobench.writers.device.base import AnyMemory, DeviceBytes


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the tensor's bytes as a view; as a copy only when it is not contiguous.

    The view keeps the memory alive. Raises UsageError for a tensor that is not dense CPU memory.
    """
    flat: Any = _flat(tensor, here=tensor.is_cpu).numpy()
    view: Bytes = flat
    return view


def tensor_memory(tensor: torch.Tensor) -> AnyMemory:
    """Return the tensor's bytes for an image: `tensor_bytes`, or its memory on a CUDA device."""
    if tensor.device.type != "cuda":
        return tensor_bytes(tensor)
    return device_bytes(_flat(tensor, here=True))


def in_place_memory(tensor: torch.Tensor) -> AnyMemory:
    """Return the memory of `tensor` itself, which a read can fill.

    Raises UsageError for a tensor whose `tensor_memory` is a copy, or that has none.
    """
    if tensor.layout == torch.strided and (
        not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()
    ):
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} is not contiguous, or a view that conjugates "
            "or negates; make a contiguous copy first"
        )
    return tensor_memory(tensor)


def device_bytes(flat: torch.Tensor) -> DeviceBytes:
    """Return a one-dimensional uint8 tensor on a CUDA device as memory of an image."""
    from iobench.writers.device.cuda import CudaBytes

    return CudaBytes(flat)


def _flat(tensor: torch.Tensor, *, here: bool) -> torch.Tensor:
    """Return the tensor's bytes on its device, as one-dimensional uint8.

    Raises UsageError unless `here`, which says that the device is supported, and for a sparse
    tensor.
    """
    if not here or tensor.layout != torch.strided:
        raise UsageError(
            f"a tensor of layout {tensor.layout} on {tensor.device} has no plain bytes; "
            "call .cpu() or .to_dense() first"
        )
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    dense = resolved(tensor).contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` detached, with lazy conjugation and negation applied to its memory."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        return plain.resolve_conj().resolve_neg()
    return plain
