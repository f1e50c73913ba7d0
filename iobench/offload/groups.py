"""Parameter groups: checked values, what a record keeps of them, and specs of the parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from iobench.errors import OptionError, StateError, UsageError
from iobench.formats.tensors import dtype_name
from iobench.offload.layout import DTYPE_BYTES, ParameterSpec
from iobench.offload.shards import local_shard

DEFAULTS: Mapping[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": True,
    "decoupled_weight_decay": True,
}
"""The values of a group, with the keys of torch.optim.AdamW: its state_dict has them."""
_UNSUPPORTED = ("amsgrad", "capturable", "differentiable")
_NOT_KEPT = ("params", "param_names")


def kind_of(values: Mapping[str, Any]) -> str:
    """Return the optimizer that a group with these values belongs to."""
    return "AdamW" if values.get("decoupled_weight_decay", True) else "Adam"


def check_values(group: Mapping[str, Any]) -> None:
    """Raise OptionError for values that the stock optimizer refuses, or that are not supported."""
    values = [(name, group.get(name, 0)) for name in ("lr", "eps", "weight_decay")]
    out = [(name, value) for name, value in values if not value >= 0]
    out += [("betas", value) for value in group.get("betas", ()) if not 0 <= value < 1]
    if out:
        raise OptionError(f"{out[0][0]}={out[0][1]}: out of range")
    for name in _UNSUPPORTED:
        if group.get(name):
            raise OptionError(f"{name}=True: not supported with offloaded state")


def kept_values(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the values of each group as a record keeps them: JSON.

    Raises StateError for a value that JSON cannot hold.
    """
    found = []
    for number, group in enumerate(groups):
        values = {}
        for name, value in group.items():
            if name in _NOT_KEPT:
                continue
            plain = value.item() if isinstance(value, torch.Tensor) else value
            try:
                json.dumps(plain)
            except (TypeError, ValueError) as error:
                raise StateError(
                    f"param_groups[{number}][{name!r}] is a {type(value).__name__}: a generation "
                    "keeps only numbers, texts, lists and None"
                ) from error
            values[name] = plain
        found.append(values)
    return found


def put_values(groups: Sequence[dict[str, Any]], kept: Sequence[Mapping[str, Any]]) -> None:
    """Give each group the values that a record has kept, like `load_state_dict` does."""
    for group, values in zip(groups, kept, strict=True):
        group.update(values)
        if "betas" in group:
            group["betas"] = tuple(group["betas"])


def specs_of(groups: Sequence[Mapping[str, Any]]) -> tuple[ParameterSpec, ...]:
    """Describe all parameters in order. Raises UsageError for one that cannot be offloaded."""
    found: list[ParameterSpec] = []
    seen: dict[int, str] = {}
    for number, group in enumerate(groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for name, parameter in zip(names, group["params"], strict=True):
            own = name or str(len(found))
            if id(parameter) in seen:
                raise UsageError(
                    f"parameter {own} is parameter {seen[id(parameter)]}: give it once"
                )
            seen[id(parameter)] = own
            if dtype_name(parameter.dtype) not in DTYPE_BYTES:
                raise UsageError(
                    f"parameter {own}: {dtype_name(parameter.dtype)} cannot be offloaded; "
                    f"only {', '.join(DTYPE_BYTES)}"
                )
            local = local_shard(parameter)
            if local.layout != torch.strided or not local.is_contiguous():
                raise UsageError(
                    f"parameter {own} is not contiguous in memory; make it so before "
                    "(parameter.data = parameter.data.contiguous())"
                )
            found.append(
                ParameterSpec(
                    name=own,
                    shape=tuple(local.shape),
                    dtype=dtype_name(parameter.dtype),
                    group=number,
                )
            )
    return tuple(found)
