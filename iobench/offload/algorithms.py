"""AdamW and Adam whose state is on storage, where every step is a checkpoint."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Unpack

import torch
from torch.optim.optimizer import ParamsT

from iobench.offload.groups import adam_defaults
from iobench.offload.optimizer import OffloadedOptimizer, Storage

__all__ = ["Adam", "AdamW"]


class AdamW(OffloadedOptimizer):
    """torch.optim.AdamW with master weights and moments on storage: 12 bytes for each element."""

    _kind = "AdamW"
    _decoupled: ClassVar[bool] = True
    _weight_decay: ClassVar[float] = 1e-2

    def __init__(
        self,
        params: ParamsT,
        directory: str | os.PathLike[str],
        *,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        maximize: bool = False,
        **storage: Unpack[Storage],
    ) -> None:
        """Values are those of the stock class; `storage`: see OffloadedOptimizer."""
        decay = self._weight_decay if weight_decay is None else weight_decay
        defaults = adam_defaults(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=decay,
            maximize=maximize,
            decoupled=self._decoupled,
        )
        super().__init__(params, directory, defaults, **storage)

    @classmethod
    def _any_defaults(cls) -> dict[str, Any]:
        return adam_defaults(
            lr=0.0,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.0,
            maximize=False,
            decoupled=cls._decoupled,
        )

    def _after_load(self, group: dict[str, Any]) -> None:
        group["decoupled_weight_decay"] = self._decoupled  # like torch


class Adam(AdamW):
    """torch.optim.Adam with its state on storage: weight decay is added to the gradient."""

    _kind = "Adam"
    _decoupled = False
    _weight_decay = 0.0
