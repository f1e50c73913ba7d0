"""Interfaces for device memory: segments of an image that are not in host memory, and their copies.

`iobench.writers.device.cuda` implements them for CUDA. It is imported with the first CUDA tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from iobench.writers.blocks.pages import Bytes

__all__ = ["Device", "DeviceBytes", "Lane", "Mark"]


class DeviceBytes(ABC):
    """Contiguous bytes in the memory of `device`, which the host cannot access.

    A slice shares the memory.
    """

    device: Device
    tensor: Any
    """The same bytes as a torch tensor of uint8."""

    @property
    @abstractmethod
    def address(self) -> int:
        """The device address of the first byte."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, part: slice) -> Self: ...


class Device(ABC):
    """One device with its own memory. It exists as long as the process."""

    name: str
    """torch's name of the device: `cuda:0`."""

    @abstractmethod
    def lane(self) -> Lane:
        """Return a new queue for copies, ordered after everything the calling thread has queued.

        It must therefore be created in the thread that calls the writer, before workers copy.
        """

    @abstractmethod
    def pin(self, block: Bytes) -> str | None:
        """Pin `block` for DMA by the device until its memory is freed. Pinning twice is free.

        Returns None, or the reason why it is not pinned. Copies still work then, but more slowly.
        """

    @abstractmethod
    def allocate(self, size_bytes: int) -> DeviceBytes:
        """Return new memory, aligned to 4 KiB, with undefined content."""


class Lane(ABC):
    """An ordered queue of copies, concurrent with the caller's own work on the device.

    Safe to use from many threads. The memory of a copy must exist until the wait for a later mark
    has returned. All methods raise TransferError.
    """

    @abstractmethod
    def copy(self, source: Bytes | DeviceBytes, destination: Bytes | DeviceBytes) -> None:
        """Queue a copy between memories of equal length. At least one is on the device."""

    @abstractmethod
    def mark(self) -> Mark:
        """Return a mark after everything that is queued so far."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all queued copies and end the queue."""


class Mark(ABC):
    """A position in a lane."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all copies before the mark are done. Raises TransferError if one failed."""
