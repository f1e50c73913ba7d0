"""Device memory: what a segment may be made of besides host memory, and how bytes leave it.

Nothing here knows CUDA; `iobench.writers.device.cuda` does. It is loaded with the first CUDA
tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from iobench.writers.blocks.pages import Bytes

__all__ = ["Device", "DeviceBytes", "Lane", "Mark"]


class DeviceBytes(ABC):
    """Contiguous bytes in the memory of `device`; slices share it. The host cannot touch them."""

    device: Device
    tensor: Any
    """The same bytes as torch sees them: a tensor of uint8."""

    @property
    @abstractmethod
    def address(self) -> int:
        """Where the first byte is, in the device's own addresses."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, part: slice) -> Self: ...


class Device(ABC):
    """One device that has memory of its own. Lives as long as the process."""

    name: str
    """As torch names it: `cuda:0`."""

    @abstractmethod
    def lane(self) -> Lane:
        """A queue for copies, behind all that the calling thread has queued on the device so far.

        So it must be made in the thread that calls the writer, before others copy.
        """

    @abstractmethod
    def pin(self, block: Bytes) -> str | None:
        """Let the device reach `block` by DMA, for as long as its memory lives; again is free.

        Returns None, or why it cannot be: copies work all the same and are slower.
        """

    @abstractmethod
    def allocate(self, size_bytes: int) -> DeviceBytes:
        """Fresh memory at a multiple of 4 KiB; its content is undefined."""


class Lane(ABC):
    """Copies in order, beside what the caller does on the device. Safe to use from many threads.

    Memory of a copy must stay until a mark behind it was awaited. All methods raise TransferError.
    """

    @abstractmethod
    def copy(self, source: Bytes | DeviceBytes, destination: Bytes | DeviceBytes) -> None:
        """Queue a copy between memories of the same length, one of them at least the device's."""

    @abstractmethod
    def mark(self) -> Mark:
        """A mark behind everything that was queued so far."""

    @abstractmethod
    def close(self) -> None:
        """Wait for everything that was queued and end."""


class Mark(ABC):
    """A place in a lane."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the lane has come this far. Raises TransferError when a copy failed."""
