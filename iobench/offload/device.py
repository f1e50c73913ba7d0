"""PinnedTransfer: gradients and values of CUDA parameters, through pinned memory of the host."""

from __future__ import annotations

import torch

__all__ = ["PinnedTransfer"]


class PinnedTransfer:
    """Copies pieces between a device and one pinned buffer, which grows to the largest piece.

    The device's own engine copies pinned memory at the full rate of the bus; pageable memory is
    first copied by the CPU. 16-bit values cross the bus as such and not as fp32. Copies have a
    stream of their own, so that kernels of backward neither wait for them nor hold them up. Tensors
    on the host pass through unchanged. Used by one thread.
    """

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def to_host(self, tensor: torch.Tensor, after: torch.cuda.Event | None = None) -> torch.Tensor:
        """Return the elements of `tensor` on the host, as they are after the event.

        Without one: after the work that the caller's stream has so far. Those of a tensor on a
        device are in the buffer, which the next call overwrites.
        """
        if tensor.is_cpu:
            return tensor
        stream = self._stream(tensor.device)
        if after is None:
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
        else:
            stream.wait_event(after)
        buffer = self._buffer(tensor)
        with torch.cuda.stream(stream):
            buffer.copy_(tensor, non_blocking=True)
        stream.synchronize()
        return buffer

    def to_device(self, values: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy `values`, which are on the host and have the same dtype, into `tensor`.

        It is in the caller's stream, so later kernels see the new values. On return the memory of
        `values` may be used again.
        """
        if tensor.is_cpu:
            tensor.copy_(values)
            return
        buffer = values if values.is_pinned() else self._buffer(tensor).copy_(values)
        tensor.copy_(buffer, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        size = like.numel() * like.element_size()
        if len(self._pinned) < size:
            self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._pinned[:size].view(like.dtype)
