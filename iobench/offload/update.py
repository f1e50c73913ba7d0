"""ChunkUpdate: one step of the optimizer on one chunk, by torch's fused kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adam import adam

from iobench.offload.buffers import ChunkBuffer
from iobench.offload.layout import ParameterPiece, StateLayout
from iobench.offload.model import StepModel, place

__all__ = ["ChunkUpdate", "step_counter"]


class ChunkUpdate:
    """One optimizer step. Call it with each chunk once; it returns whether the chunk changed.

    Parameters without a gradient keep their state, as in torch. Each piece of a parameter begins at
    a whole unit of the fused kernel, so the result has the same bits as one call with the whole
    parameter (docs/decisions/0055).
    """

    def __init__(
        self,
        layout: StateLayout,
        model: StepModel,
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
        self._model.end(buffer.chunk)
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
