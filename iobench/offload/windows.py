"""SharedWindows: shared memory through which gradients and values of a few chunks pass."""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch

from iobench.errors import transfer_errors
from iobench.offload.buffers import parameter_view
from iobench.offload.layout import BLOCK, ParameterPiece, StateLayout
from iobench.offload.model import place
from iobench.writers.image import Bytes

__all__ = ["WINDOWS", "SharedWindows", "window_bytes"]

WINDOWS = 3
"""One is filled, one is updated, one is emptied."""
_FP32 = 4


def window_bytes(layout: StateLayout) -> int:
    """Return the bytes of one window: the gradients of a chunk in fp32, and its values."""
    return _gradient_bytes(layout) + max(map(layout.parameter_bytes, range(layout.chunks)))


def _gradient_bytes(layout: StateLayout) -> int:
    return -(-layout.chunk_elements * _FP32 // BLOCK) * BLOCK


class SharedWindows:
    """The memory file `fd`, mapped: WINDOWS windows, each for one chunk at a time."""

    def __init__(self, fd: int, layout: StateLayout) -> None:
        self._layout = layout
        self._size = window_bytes(layout)
        self._memory: Bytes = np.frombuffer(mmap.mmap(fd, WINDOWS * self._size), dtype=np.uint8)

    @classmethod
    def create(cls, layout: StateLayout) -> tuple[SharedWindows, int]:
        """Make a memory file with all its pages; return it with its descriptor.

        Pages of a memory file count in the control group, and not in the size of /dev/shm. Raises
        TransferError (ENOSPC, ENOMEM) when there is too little memory: an access cannot fail later.
        """
        fd = os.memfd_create("iobench-offload", os.MFD_CLOEXEC)
        try:
            with transfer_errors("reserving shared memory", "memfd:iobench-offload"):
                os.posix_fallocate(fd, 0, WINDOWS * window_bytes(layout))
            return cls(fd, layout), fd
        except BaseException:
            os.close(fd)
            raise

    def gradient(self, window: int, piece: ParameterPiece) -> torch.Tensor:
        """The fp32 gradient of `piece`."""
        size = self._layout.chunk_elements * _FP32
        return place(piece, torch.from_numpy(self._window(window)[:size]).view(torch.float32))

    def value(self, window: int, piece: ParameterPiece) -> torch.Tensor:
        """The value of `piece`, in its own dtype."""
        values = self._window(window)[_gradient_bytes(self._layout) :]
        return parameter_view(self._layout, piece, values)

    def _window(self, window: int) -> Bytes:
        start = window * self._size
        return self._memory[start : start + self._size]
