"""Pinned: host memory that a GPU can copy to by DMA (cudaHostRegister)."""

from __future__ import annotations

import torch

from iobench.errors import UnavailableError
from iobench.writers.image import Bytes

__all__ = ["Pinned", "current_device"]


def current_device() -> int:
    """Return the number of the CUDA device that the calling thread uses."""
    return torch.cuda.current_device()


class Pinned:
    """`memory` registered with CUDA until `release`. Raises UnavailableError when that fails.

    `device` is that of the caller's thread by default (-1). In a new thread it would be device 0,
    where CUDA would take memory for one more context.
    """

    def __init__(self, memory: Bytes, device: int = -1) -> None:
        self._memory = memory  # stays mapped while it is registered
        self._address = memory.ctypes.data
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(self._address, len(memory), 0))
        if code:
            raise UnavailableError(
                "pinned memory",
                f"cudaHostRegister of {len(memory)} bytes failed with code {code}.",
                "Use fewer slots, or raise the limit of locked memory (ulimit -l).",
            )

    def release(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self._address)
