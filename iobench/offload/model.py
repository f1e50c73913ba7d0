"""StepModel: where an update finds gradients and puts new values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from iobench.errors import UsageError
from iobench.offload.layout import ParameterPiece, StateLayout

__all__ = ["StepModel", "TrainerModel", "flat_view", "place"]


class StepModel(Protocol):
    """The parameters of a model in one step, piece by piece."""

    def has_gradient(self, parameter: int) -> bool:
        """Whether the parameter is updated."""

    def was_written(self, parameter: int) -> bool:
        """Whether the trainer has written to the parameter since the last step."""

    def begin(self, chunk: int) -> None:
        """Make the pieces of `chunk` accessible."""

    def gradient(self, piece: ParameterPiece) -> torch.Tensor:
        """The gradient of a piece of the chunk; one-dimensional."""

    def value(self, piece: ParameterPiece) -> torch.Tensor:
        """The piece itself, writable; one-dimensional."""

    def end(self, chunk: int) -> None:
        """The new values of `chunk` are complete."""


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor in one dimension, detached."""
    return tensor.detach().view(-1)


def place(piece: ParameterPiece, tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a chunk's tensor that belongs to `piece`."""
    return tensor[piece.at : piece.at + piece.end - piece.begin]


class TrainerModel:
    """The trainer's own parameters. Raises UsageError for a gradient that is not dense."""

    def __init__(
        self, layout: StateLayout, parameters: Sequence[torch.Tensor], versions: Sequence[int]
    ) -> None:
        """`versions`: torch's counters of changes after the last step."""
        self._parameters, self._versions = parameters, versions
        for spec, parameter in zip(layout.parameters, parameters, strict=True):
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise UsageError(
                    f"parameter {spec.name}: its gradient is {parameter.grad.layout}; only dense "
                    "ones can be used"
                )

    def has_gradient(self, parameter: int) -> bool:
        return self._parameters[parameter].grad is not None

    def was_written(self, parameter: int) -> bool:
        return self._parameters[parameter]._version != self._versions[parameter]

    def begin(self, chunk: int) -> None:
        """All pieces are accessible."""

    def gradient(self, piece: ParameterPiece) -> torch.Tensor:
        gradient = self._parameters[piece.parameter].grad
        assert gradient is not None
        return gradient.detach().contiguous().view(-1)[piece.begin : piece.end]

    def value(self, piece: ParameterPiece) -> torch.Tensor:
        return flat_view(self._parameters[piece.parameter])[piece.begin : piece.end]

    def end(self, chunk: int) -> None:
        """Nothing to do: values are the trainer's own."""
