"""AdamW, Adam and SGD whose state is on storage, where every step is a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch.optim.optimizer import ParamsT

from iobench.errors import UsageError
from iobench.offload import kernels
from iobench.offload.groups import adam_defaults, sgd_defaults
from iobench.offload.optimizer import OffloadedOptimizer
from iobench.offload.storage import Storage

__all__ = ["SGD", "Adam", "AdamW"]


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

    def _tensors(self) -> tuple[str, ...]:
        return kernels.ADAM

    def _after_load(self, group: dict[str, Any]) -> None:
        group["decoupled_weight_decay"] = self._decoupled  # like torch


class Adam(AdamW):
    """torch.optim.Adam with its state on storage: weight decay is added to the gradient."""

    _kind = "Adam"
    _decoupled = False
    _weight_decay = 0.0


class SGD(OffloadedOptimizer):
    """torch.optim.SGD with its state on storage: 8 bytes for each element, and 4 without momentum.

    A group has a momentum from the beginning, or never.
    """

    _kind = "SGD"

    def __init__(
        self,
        params: ParamsT,
        directory: str | os.PathLike[str],
        *,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        **storage: Unpack[Storage],
    ) -> None:
        """Values are those of the stock class; `storage`: see OffloadedOptimizer."""
        defaults = sgd_defaults(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
        )
        super().__init__(params, directory, defaults, **storage)

    @classmethod
    def _any_defaults(cls) -> dict[str, Any]:
        return sgd_defaults(
            lr=0.0,
            momentum=0.0,
            dampening=0.0,
            weight_decay=0.0,
            nesterov=False,
            maximize=False,
        )

    def _tensors(self) -> tuple[str, ...]:
        momentum = any(group["momentum"] for group in self.param_groups)
        return kernels.SGD_MOMENTUM if momentum else kernels.SGD

    def _after_load(self, group: dict[str, Any]) -> None:
        self._check_momentum(group)

    def _values(self) -> list[dict[str, Any]]:
        for group in self.param_groups:
            self._check_momentum(group)
        return super()._values()

    def _check_momentum(self, group: Mapping[str, Any]) -> None:
        with_buffer = self._running().layout.tensors == kernels.SGD_MOMENTUM
        if group["momentum"] and not with_buffer:
            raise UsageError(
                f"momentum={group['momentum']}: the state has no momentum; construct it with one"
            )
