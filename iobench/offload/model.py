"""StepModel: where an update finds gradients and puts new values, on the host or a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from iobench.errors import UsageError
from iobench.formats.tensors import dtype_name
from iobench.offload.layout import ParameterPiece, StateLayout
from iobench.offload.shards import local_gradient, local_shard

__all__ = [
    "AtOnce",
    "ChunkPace",
    "ParameterMark",
    "PinnedTransfer",
    "StepModel",
    "TrainerModel",
    "check_gradients",
    "flat_view",
    "gradient_of",
    "in_fp32",
    "marks_of",
    "place",
    "value_of",
]


class ChunkPace(Protocol):
    """Says when chunks can be updated."""

    def plan(self, chunks: Sequence[int]) -> None:
        """These chunks follow, in this order."""

    def ready(self, chunk: int) -> bool:
        """Wait until `chunk` can be updated; False: the pass stops before it."""


class AtOnce:
    """A ChunkPace that waits for nothing."""

    def plan(self, chunks: Sequence[int]) -> None:
        """Nothing to do."""

    def ready(self, chunk: int) -> bool:  # noqa: ARG002 -- all are
        return True


class StepModel(ChunkPace, Protocol):
    """The parameters of a model in one step, piece by piece."""

    def has_gradient(self, parameter: int) -> bool:
        """Whether the parameter is updated."""

    def was_written(self, parameter: int) -> bool:
        """Whether the trainer has written to the parameter since the last step."""

    def gradient(self, piece: ParameterPiece, scratch: torch.Tensor) -> torch.Tensor:
        """The gradient of a piece of the chunk in fp32 on the host, which may be in `scratch`.

        One-dimensional, and only once for each piece."""

    def value(self, piece: ParameterPiece) -> torch.Tensor:
        """The piece itself, before the step, on the host; one-dimensional, until the next call."""

    def put(self, piece: ParameterPiece, values: torch.Tensor) -> None:
        """Take the new values of a piece, in its own dtype."""

    def end(self, chunk: int) -> None:
        """The new values of `chunk` are complete."""


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor in one dimension, detached: those of this rank."""
    return local_shard(tensor).detach().view(-1)


def place(piece: ParameterPiece, tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a chunk's tensor that belongs to `piece`."""
    return tensor[piece.at : piece.at + piece.end - piece.begin]


def check_gradients(layout: StateLayout, parameters: Sequence[torch.Tensor]) -> None:
    """Raise UsageError for a gradient that is not dense, or a parameter that is another one now."""
    for spec, given in zip(layout.parameters, parameters, strict=True):
        parameter, gradient = local_shard(given), local_gradient(given)
        if (tuple(parameter.shape), dtype_name(parameter.dtype)) != (spec.shape, spec.dtype):
            raise UsageError(
                f"parameter {spec.name}: {dtype_name(parameter.dtype)} {list(parameter.shape)} now,"
                f" the state is of {spec.dtype} {list(spec.shape)}; convert the model before the "
                "optimizer is made"
            )
        if gradient is not None and (
            gradient.layout != torch.strided or gradient.shape != parameter.shape
        ):
            raise UsageError(
                f"parameter {spec.name}: its gradient is {gradient.layout} {list(gradient.shape)}; "
                "only dense ones of the same shape and sharding can be used"
            )


ParameterMark = tuple[int, int]
"""torch's counter of changes of a parameter, and its address: `parameter.data = ...` sets another
tensor and does not count."""


def marks_of(parameters: Sequence[torch.Tensor]) -> list[ParameterMark]:
    """Return what differs later if the trainer has written to a parameter."""
    return [(one._version, one.data_ptr()) for one in map(local_shard, parameters)]


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


class TrainerModel(AtOnce):
    """The trainer's own parameters."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        marks: Sequence[ParameterMark],
        transfer: PinnedTransfer,
    ) -> None:
        """`marks`: those after the last step."""
        self._parameters = parameters
        # Now: each new value counts as a change.
        self._written = [now != then for now, then in zip(marks_of(parameters), marks, strict=True)]
        self.transfer = transfer

    def has_gradient(self, parameter: int) -> bool:
        return self._parameters[parameter].grad is not None

    def was_written(self, parameter: int) -> bool:
        return self._written[parameter]

    def gradient(self, piece: ParameterPiece, scratch: torch.Tensor) -> torch.Tensor:
        parameter = self._parameters[piece.parameter]
        return in_fp32(self.transfer.to_host(gradient_of(parameter, piece)), scratch, parameter)

    def value(self, piece: ParameterPiece) -> torch.Tensor:
        return self.transfer.to_host(value_of(self._parameters[piece.parameter], piece))

    def put(self, piece: ParameterPiece, values: torch.Tensor) -> None:
        self.transfer.to_device(values, value_of(self._parameters[piece.parameter], piece))

    def end(self, chunk: int) -> None:
        """Nothing to do: values are the trainer's own."""


def in_fp32(gradient: torch.Tensor, scratch: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return `gradient`, which is on the host, in fp32: itself, or a copy in `scratch`."""
    if gradient.dtype == torch.float32 and parameter.is_cpu:
        return gradient
    return scratch.copy_(gradient)  # that of a device is in a buffer for one piece


def value_of(parameter: torch.Tensor, piece: ParameterPiece) -> torch.Tensor:
    """Return the elements of `piece`, a view."""
    return flat_view(parameter)[piece.begin : piece.end]


def gradient_of(parameter: torch.Tensor, piece: ParameterPiece) -> torch.Tensor:
    """Return the gradient of `piece`: a view, or a copy where the gradient is not contiguous."""
    gradient = local_gradient(parameter)
    assert gradient is not None
    return gradient.detach().contiguous().view(-1)[piece.begin : piece.end]
