"""localized: the state of one rank with the local tensors of its DTensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from iobench.checkpoint.aliases import Leaf, View
from iobench.checkpoint.per_rank import PerRank
from iobench.checkpoint.state_tree import Share
from iobench.errors import StateError
from iobench.formats.tensor_layouts import TensorLayouts

__all__ = ["localized", "tied"]


def localized(state: Any, found: list[DTensor | None]) -> Any:
    """Return `state` with each DTensor replaced by its local tensor; without one, `state` itself.

    `found` gets, for each tensor in the order of the state, its DTensor, or None for a plain one.
    Nothing is copied except containers with DTensors in them, and no collective is called.
    """
    try:
        return _localized(state, found)
    except RecursionError as error:
        raise StateError("the state contains itself, or is nested too deep") from error


def _localized(value: Any, found: list[DTensor | None]) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor):
            found.append(value)
            return _local(value)
        found.append(None)
        return value
    if kind is dict or kind is OrderedDict:
        items = {key: _localized(item, found) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        if kind is dict:
            return items
        made = OrderedDict(items)
        vars(made).update(vars(value))
        return made
    if kind is list or kind is tuple:
        parts = [_localized(item, found) for item in value]
        same = all(one is other for one, other in zip(parts, value, strict=True))
        return value if same else kind(parts)
    if kind is PerRank:
        inner = _localized(value.value, found)
        return value if inner is value.value else PerRank(inner)
    return value


def _local(tensor: DTensor) -> torch.Tensor:
    local = tensor._local_tensor
    if type(local) is torch.Tensor:
        return local.detach()
    # The result of a collective that still runs, for example: to_local waits for it.
    detached: Any = tensor.detach()
    waited: torch.Tensor = detached.to_local()
    return waited


def tied(sharded: list[DTensor | None]) -> Share:
    """Return the function that finds tied tensors: the same memory, shape and sharding.

    Tensors whose memory only overlaps are saved separately, like in stock DCP.
    """

    def share(
        tensors: Mapping[str, torch.Tensor], layouts: TensorLayouts
    ) -> tuple[dict[str, Leaf], dict[str, View]]:
        first: dict[Any, str] = {}
        views: dict[str, View] = {}
        for (name, tensor), layout, whole in zip(
            tensors.items(), layouts.each, sharded, strict=True
        ):
            key = (
                tensor.untyped_storage()._cdata,
                tensor.storage_offset(),
                layout,
                None if whole is None else whole._spec,
            )
            leaf = first.setdefault(key, name)
            if leaf != name:
                views[name] = View(leaf=leaf)
        return {}, views

    return share
