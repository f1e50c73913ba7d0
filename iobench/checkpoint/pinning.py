"""Pinned: host memory that a GPU can copy to by DMA (cudaHostRegister)."""

from __future__ import annotations

import torch

from iobench.errors import UnavailableError
from iobench.writers.image import Bytes

__all__ = ["Pinned"]


class Pinned:
    """`memory` registered with CUDA until `release`. Raises UnavailableError when that fails."""

    def __init__(self, memory: Bytes) -> None:
        self._address = memory.ctypes.data
        code = int(torch.cuda.cudart().cudaHostRegister(self._address, len(memory), 0))
        if code:
            raise UnavailableError(
                "pinned memory",
                f"cudaHostRegister of {len(memory)} bytes failed with code {code}.",
                "Use fewer slots, or raise the limit of locked memory (ulimit -l).",
            )

    def release(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self._address)
