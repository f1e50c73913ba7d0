"""Interfaces for device memory: segments of an image that are not in host memory, and their copies.

`iobench.writers.device.cuda` implements them for CUDA. It is imported with the first CUDA tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self, TypeAlias

from iobench.writers.blocks.pages import Bytes

AnyMemory: TypeAlias = "Bytes | DeviceBytes"
"""The memory of a segment: on the host or on a device."""


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
    def current(self) -> AbstractContextManager[object]:
        """Make it the current device of the calling thread, and the previous one again after it.

        A library that takes addresses on the device needs that. A new thread has device 0, where
        the first call takes memory for a context.
        """

    @abstractmethod
    def stream(self) -> CopyStream:
        """Return a new stream, ordered after everything the calling thread has queued.

        It must therefore be created in the thread that calls the writer, before workers copy.
        """

    @abstractmethod
    def pin(self, memory: Bytes) -> str | None:
        """Pin `memory` for DMA by the device until it is freed. Pinning twice is free.

        Returns None, or the reason why it is not pinned. Copies still work then, but more slowly.
        """

    @abstractmethod
    def allocate(self, size_bytes: int) -> DeviceBytes:
        """Return new memory, aligned to 4 KiB, with undefined content.

        No work that was queued on the device before still uses it.
        """


class CopyStream(ABC):
    """An ordered queue of copies, concurrent with the caller's own work on the device.

    Safe to use from many threads. The memory of a copy must exist until the wait for a later mark
    has returned. All methods raise TransferError.
    """

    @abstractmethod
    def copy(self, source: Any, destination: Any) -> None:
        """Queue a copy between memories of equal length. At least one is on the device.

        They are Bytes or DeviceBytes. The source may also be a torch tensor on the device, of any
        dtype and strides.
        """

    @abstractmethod
    def to_host(self, tensor: Any) -> Any:
        """Queue a copy of a torch tensor on the device; return the CPU tensor that it fills.

        Its strides are those of `tensor.cpu()`. It may be dropped before the copy is done.
        """

    @abstractmethod
    def mark(self) -> Callable[[], None]:
        """Return a function that waits for all copies queued so far. It raises if one failed."""
