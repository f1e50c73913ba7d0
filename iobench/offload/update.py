"""ChunkUpdate: one step of the optimizer on one chunk, by torch's fused kernels.

TrainerModel: where it finds gradients and puts new values, on the host or a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adam import adam

from iobench.errors import UsageError
from iobench.formats.tensors import dtype_name
from iobench.offload.chunks import ChunkBuffer
from iobench.offload.layout import ParameterPiece, StateLayout
from iobench.offload.parameters import local_gradient, local_shard


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


class TrainerModel:
    """The trainer's own parameters in one step, piece by piece."""

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
        """Whether the parameter is updated."""
        return self._parameters[parameter].grad is not None

    def was_written(self, parameter: int) -> bool:
        """Whether the trainer has written to the parameter since the last step."""
        return self._written[parameter]

    def gradient(self, piece: ParameterPiece, scratch: torch.Tensor) -> torch.Tensor:
        """The gradient of a piece of the chunk in fp32 on the host, which may be in `scratch`.

        One-dimensional, and only once for each piece."""
        parameter = self._parameters[piece.parameter]
        return in_fp32(self.transfer.to_host(gradient_of(parameter, piece)), scratch, parameter)

    def value(self, piece: ParameterPiece) -> torch.Tensor:
        """The piece itself, before the step, on the host; one-dimensional, until the next call."""
        return self.transfer.to_host(value_of(self._parameters[piece.parameter], piece))

    def put(self, piece: ParameterPiece, values: torch.Tensor) -> None:
        """Take the new values of a piece, in its own dtype."""
        self.transfer.to_device(values, value_of(self._parameters[piece.parameter], piece))


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


class ChunkUpdate:
    """One optimizer step. Call it with each chunk once; it returns whether the chunk changed.

    Parameters without a gradient keep their state, as in torch. Each piece of a parameter begins at
    a whole unit of the fused kernel, so the result has the same bits as one call with the whole
    parameter (docs/decisions/0055).
    """

    def __init__(
        self,
        layout: StateLayout,
        model: TrainerModel,
        groups: Sequence[Mapping[str, Any]],
        counts: Sequence[int],
        scratch: torch.Tensor,
    ) -> None:
        """`counts`: the updates of each parameter before this one. `scratch`: fp32 memory of one
        chunk for gradients."""
        self._layout, self._model, self._groups = layout, model, groups
        self._counts, self._scratch = counts, scratch

    def __call__(self, buffer: ChunkBuffer) -> bool:
        tensors, pieces = buffer.tensors(), self._layout.pieces(buffer.chunk)
        changed = buffer.fresh
        for piece in pieces:
            changed |= self._take_value(piece, place(piece, tensors[0]), fresh=buffer.fresh)
        due = [piece for piece in pieces if self._model.has_gradient(piece.parameter)]
        for group in sorted({self._group(piece) for piece in due}):
            self._update([one for one in due if self._group(one) == group], group, tensors)
        for piece in due:
            buffer.parameter(piece).copy_(place(piece, tensors[0]))
            self._model.put(piece, buffer.parameter(piece))
        if changed or due:
            for piece in pieces:
                if not self._model.has_gradient(piece.parameter):
                    buffer.parameter(piece).copy_(self._model.value(piece))
        return changed or bool(due)

    def _group(self, piece: ParameterPiece) -> int:
        return self._layout.parameters[piece.parameter].group

    def _take_value(self, piece: ParameterPiece, master: torch.Tensor, *, fresh: bool) -> bool:
        """Give the master weights what the trainer has written to the model; return whether so."""
        if not fresh and not self._model.was_written(piece.parameter):
            return False
        value = self._model.value(piece)
        if fresh:
            master.copy_(value)
            return True
        same = master.to(value.dtype) == value
        if bool(same.all()):
            return False
        master.copy_(torch.where(same, master, value.float()))
        return True

    def _update(
        self, pieces: Sequence[ParameterPiece], group: int, tensors: list[torch.Tensor]
    ) -> None:
        _adam_update(
            self._groups[group],
            [[place(one, tensor) for one in pieces] for tensor in tensors],
            [self._model.gradient(one, place(one, self._scratch)) for one in pieces],
            [self._counts[piece.parameter] for piece in pieces],
        )


def _adam_update(
    values: Mapping[str, Any],
    tensors: Sequence[list[torch.Tensor]],
    gradients: list[torch.Tensor],
    counts: Sequence[int],
) -> None:
    """Update `tensors`: a list of pieces for each of ADAM.

    `values` are those of the group, `gradients` have the pieces in fp32, and `counts` say how often
    each piece was updated before.
    """
    masters, averages, squares = tensors
    beta1, beta2 = values["betas"]
    adam(
        masters,
        gradients,
        averages,
        squares,
        [],
        [step_counter(count) for count in counts],  # torch adds 1 before it uses them
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=values["lr"],
        weight_decay=values["weight_decay"],
        eps=values["eps"],
        maximize=values["maximize"],
        decoupled_weight_decay=values["decoupled_weight_decay"],
    )


def step_counter(count: int) -> torch.Tensor:
    """Return `step` like torch keeps it for a fused kernel on the host.

    Its dtype is given: under torch.set_default_dtype(torch.bfloat16), 300 + 1 would be 300.
    """
    return torch.tensor(float(count), dtype=torch.float32, device="cpu")
