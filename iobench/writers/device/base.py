"""DeviceBytes: memory of an image that is not on the host. This module does not import torch.

`iobench.writers.device.cuda` has the devices. It is imported with the first CUDA tensor.
"""

from __future__ import annotations

from typing import Any, Self, TypeAlias

from iobench.writers.blocks.pages import Bytes

AnyMemory: TypeAlias = "Bytes | DeviceBytes"
"""The memory of a segment: on the host or on a device."""


class DeviceBytes:
    """Contiguous bytes in the memory of a `Device`, which the host cannot access.

    `tensor` has the same bytes as a torch tensor of uint8. A slice shares the memory.
    """

    def __init__(self, tensor: Any, device: Any) -> None:
        self.tensor, self.device = tensor, device

    @property
    def address(self) -> int:
        """The device address of the first byte."""
        found: int = self.tensor.data_ptr()
        return found

    def __len__(self) -> int:
        length: int = self.tensor.numel()
        return length

    def __getitem__(self, part: slice) -> Self:
        return type(self)(self.tensor[part], self.device)
