"""Kernels: one optimizer step on pieces of one parameter group, by torch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

__all__ = ["ADAM", "SGD", "SGD_MOMENTUM", "Kernel", "kernel_of"]

ADAM = ("master", "exp_avg", "exp_avg_sq")
"""The fp32 tensors of each parameter with Adam and AdamW."""
SGD = ("master",)
"""With SGD, if no group has a momentum."""
SGD_MOMENTUM = ("master", "momentum_buffer")
"""With SGD, if one has."""

Kernel = Callable[
    [Mapping[str, Any], Sequence[list[torch.Tensor]], list[torch.Tensor], Sequence[int]], None
]
"""Gets the values of the group, a list of pieces for each fp32 tensor, the gradients of the pieces
in fp32, and how often each piece was updated before."""


def kernel_of(tensors: Sequence[str]) -> Kernel:
    """Return the kernel for a layout with these fp32 tensors."""
    return _adam if tuple(tensors) == ADAM else _sgd


def _adam(
    values: Mapping[str, Any],
    tensors: Sequence[list[torch.Tensor]],
    gradients: list[torch.Tensor],
    counts: Sequence[int],
) -> None:
    masters, averages, squares = tensors
    beta1, beta2 = values["betas"]
    adam(
        masters,
        gradients,
        averages,
        squares,
        [],
        [torch.tensor(float(count)) for count in counts],  # torch adds 1 before it uses them
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


def _sgd(
    values: Mapping[str, Any],
    tensors: Sequence[list[torch.Tensor]],
    gradients: list[torch.Tensor],
    counts: Sequence[int],
) -> None:
    """The first update of a momentum buffer is the gradient, so those pieces are a call of their
    own: the kernel has one flag for all."""
    for first in (True, False):
        own = [index for index, count in enumerate(counts) if (count == 0) is first]
        if not own:
            continue
        buffers = [tensors[1][index] for index in own] if values["momentum"] else []
        given: list[torch.Tensor | None] = [None for _ in buffers] if first else list(buffers)
        sgd(
            [tensors[0][index] for index in own],
            [gradients[index] for index in own],
            given,
            fused=True,
            has_sparse_grad=False,
            weight_decay=values["weight_decay"],
            momentum=values["momentum"],
            lr=values["lr"],
            dampening=values["dampening"],
            nesterov=values["nesterov"],
            maximize=values["maximize"],
        )
        if first:  # torch has made new buffers
            for buffer, made in zip(buffers, given, strict=True):
                assert made is not None
                buffer.copy_(made)
