"""AdamUpdate: one step of Adam or AdamW on one chunk, by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adam import adam

from iobench.errors import UsageError
from iobench.offload.buffers import ChunkBuffer
from iobench.offload.layout import DTYPE_BYTES, Layout, Piece

__all__ = ["TENSORS", "AdamUpdate", "flat_view"]

TENSORS = ("master", "exp_avg", "exp_avg_sq")


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor in one dimension, detached."""
    return tensor.detach().view(-1)


class AdamUpdate:
    """One optimizer step. Call it with each chunk once; it returns whether the chunk changed.

    Parameters without a gradient keep their state, as in torch. Each piece of a parameter begins at
    a whole unit of the fused kernel, so the result has the same bits as one call with the whole
    parameter (docs/decisions/0055).
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
        counts: Sequence[int],
        adopted: Sequence[bool],
        scratch: torch.Tensor,
    ) -> None:
        """`counts`: the updates of each parameter before this one. `adopted`: whether the trainer
        has written to the parameter since. `scratch`: fp32 memory of one chunk for gradients."""
        self._layout, self._parameters, self._groups = layout, parameters, groups
        self._counts, self._adopted, self._scratch = counts, adopted, scratch

    def __call__(self, buffer: ChunkBuffer) -> bool:
        tensors = buffer.tensors()
        pieces = self._layout.pieces(buffer.chunk)
        changed = buffer.fresh
        for piece in pieces:
            changed |= self._take_value(piece, tensors[0], fresh=buffer.fresh)
        due = [piece for piece in pieces if self._parameters[piece.parameter].grad is not None]
        if not due and not changed:
            return False
        for group in sorted({self._layout.parameters[piece.parameter].group for piece in due}):
            self._update([p for p in due if self._group(p) == group], group, tensors)
        area = torch.from_numpy(buffer.parameters)
        with torch.no_grad():
            for piece in due:
                self._value(piece).copy_(tensors[0][piece.at : piece.at + piece.end - piece.begin])
            for piece in pieces:
                value = self._value(piece)
                size = len(value) * DTYPE_BYTES[self._layout.parameters[piece.parameter].dtype]
                room = area[piece.bytes_at : piece.bytes_at + size]
                room.view(value.dtype).copy_(value)
        return True

    def _group(self, piece: Piece) -> int:
        return self._layout.parameters[piece.parameter].group

    def _value(self, piece: Piece) -> torch.Tensor:
        """The piece in the model."""
        return flat_view(self._parameters[piece.parameter])[piece.begin : piece.end]

    def _take_value(self, piece: Piece, master: torch.Tensor, *, fresh: bool) -> bool:
        """Give the master weights what the trainer has written to the model; return whether so."""
        value = self._value(piece)
        own = master[piece.at : piece.at + piece.end - piece.begin]
        if fresh or (value.dtype == torch.float32 and self._adopted[piece.parameter]):
            own.copy_(value)
            return True
        if not self._adopted[piece.parameter]:
            return False
        there = value.to(own.device)
        same = own.to(value.dtype) == there
        if bool(same.all()):
            return False
        own.copy_(torch.where(same, own, there.float()))
        return True

    def _update(self, pieces: Sequence[Piece], group: int, tensors: list[torch.Tensor]) -> None:
        values = self._groups[group]
        states: list[list[torch.Tensor]] = [[], [], []]
        grads, steps = [], []
        for piece in pieces:
            span = slice(piece.at, piece.at + piece.end - piece.begin)
            for state, tensor in zip(states, tensors, strict=True):
                state.append(tensor[span])
            grads.append(self._gradient(piece, self._scratch[span]))
            steps.append(torch.tensor(float(self._counts[piece.parameter])))
        beta1, beta2 = values["betas"]
        with torch.no_grad():
            adam(
                states[0],
                grads,
                states[1],
                states[2],
                [],
                steps,
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

    def _gradient(self, piece: Piece, scratch: torch.Tensor) -> torch.Tensor:
        """The piece of the gradient in fp32 on the host: a view where it is that already."""
        grad = self._parameters[piece.parameter].grad
        assert grad is not None
        if grad.layout != torch.strided:
            name = self._layout.parameters[piece.parameter].name
            raise UsageError(f"parameter {name}: its gradient is {grad.layout}; only dense ones")
        flat = grad.detach().contiguous().view(-1)[piece.begin : piece.end]
        if flat.dtype == torch.float32 and flat.is_cpu:
            return flat
        return scratch.copy_(flat)
