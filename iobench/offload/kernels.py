"""adam_update: one step of Adam or AdamW on pieces of one group, by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adam import adam

__all__ = ["adam_update", "step_counter"]


def adam_update(
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
