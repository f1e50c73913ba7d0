"""StepModel: where an update finds gradients and puts new values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from iobench.errors import UsageError
from iobench.offload.device import PinnedTransfer
from iobench.offload.layout import ParameterPiece, StateLayout

__all__ = [
    "AtOnce",
    "ChunkPace",
    "StepModel",
    "TrainerModel",
    "check_dense",
    "flat_view",
    "gradient_of",
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

    def gradient(self, piece: ParameterPiece) -> torch.Tensor:
        """The gradient of a piece of the chunk; one-dimensional, and only once for each piece."""

    def value(self, piece: ParameterPiece) -> torch.Tensor:
        """The piece itself, before the step; one-dimensional."""

    def put(self, piece: ParameterPiece, values: torch.Tensor) -> None:
        """Take the new values of a piece, in its own dtype."""

    def end(self, chunk: int) -> None:
        """The new values of `chunk` are complete."""


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor in one dimension, detached."""
    return tensor.detach().view(-1)


def place(piece: ParameterPiece, tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a chunk's tensor that belongs to `piece`."""
    return tensor[piece.at : piece.at + piece.end - piece.begin]


def check_dense(layout: StateLayout, parameters: Sequence[torch.Tensor]) -> None:
    """Raise UsageError for a gradient that is not dense."""
    for spec, parameter in zip(layout.parameters, parameters, strict=True):
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UsageError(
                f"parameter {spec.name}: its gradient is {parameter.grad.layout}; only dense "
                "ones can be used"
            )


class TrainerModel(AtOnce):
    """The trainer's own parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
        """`versions`: torch's counters of changes after the last step."""
        self._parameters = parameters
        # Now: each new value counts as a change.
        self._written = [p._version != v for p, v in zip(parameters, versions, strict=True)]
        self.transfer = PinnedTransfer()

    def has_gradient(self, parameter: int) -> bool:
        return self._parameters[parameter].grad is not None

    def was_written(self, parameter: int) -> bool:
        return self._written[parameter]

    def gradient(self, piece: ParameterPiece) -> torch.Tensor:
        return self.transfer.to_host(gradient_of(self._parameters[piece.parameter], piece))

    def value(self, piece: ParameterPiece) -> torch.Tensor:
        return self.transfer.to_host(value_of(self._parameters[piece.parameter], piece))

    def put(self, piece: ParameterPiece, values: torch.Tensor) -> None:
        self.transfer.to_device(values, value_of(self._parameters[piece.parameter], piece))

    def end(self, chunk: int) -> None:
        """Nothing to do: values are the trainer's own."""


def value_of(parameter: torch.Tensor, piece: ParameterPiece) -> torch.Tensor:
    """Return the elements of `piece`, a view."""
    return flat_view(parameter)[piece.begin : piece.end]


def gradient_of(parameter: torch.Tensor, piece: ParameterPiece) -> torch.Tensor:
    """Return the gradient of `piece`: a view, or a copy where the gradient is not contiguous."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.detach().contiguous().view(-1)[piece.begin : piece.end]
