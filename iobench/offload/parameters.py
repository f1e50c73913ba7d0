"""The trainer's parameters: their groups, what a record keeps of these, and their specs.

ShardRanks: the ranks of a job whose parameters are DTensors (FSDP2). Each keeps its own shards.
Nothing of them is gathered or sent: a rank has a state directory of its own. What the ranks agree
on is which step they are in. A step overwrites the slots of the generation before the last one, so
it begins only when the last one is durable in all ranks. However a job ends, all of them have one
generation in common then, and at most one more.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from iobench.checkpoint.ranked.structure import is_sharded, local_box
from iobench.errors import OptionError, RankError, StateError, TargetError, UsageError
from iobench.formats.tensors import dtype_name
from iobench.offload.layout import DTYPE_BYTES, ParameterSpec

_NAME = re.compile(r"rank-\d+-of-(\d+)")
_T = TypeVar("_T")


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, in the same memory; another tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # else it would be another tensor of the graph
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]  # of DTensors
    return local


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of this rank's part of a parameter."""
    return None if parameter.grad is None else local_shard(parameter.grad)


def local_part(value: Any, parameter: torch.Tensor) -> Any:
    """Return this rank's part of `value`, which is of a parameter: a DTensor like it, or whole.

    Raises StateError for a DTensor with another sharding.
    """
    if not is_sharded(parameter) or getattr(value, "ndim", 0) != parameter.ndim:  # `step`, too
        return local_shard(value)
    if is_sharded(value):
        own: Any = parameter
        one, other = (value.device_mesh, value.placements), (own.device_mesh, own.placements)
        if one != other:
            raise StateError(f"a DTensor with {one}; the parameter has {other}: load it like that")
        return local_shard(value)
    if value.shape != parameter.shape:
        raise StateError(f"{list(value.shape)} elements; the parameter has {list(parameter.shape)}")
    sizes, offsets = local_box(parameter)
    for dimension, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        value = value.narrow(dimension, min(offset, value.shape[dimension] - size), size)
    return value.contiguous()


class ShardRanks:
    """The ranks of a job that have shards of the same parameters, or one process alone.

    They talk in torch's default process group. All of them call the same methods in the same order.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.sharded = any(map(is_sharded, parameters))
        """Whether the parameters are DTensors."""
        self.rank, self.size = 0, 1
        if self.sharded:
            self.rank = torch.distributed.get_rank()
            self.size = torch.distributed.get_world_size()

    def directory(self, directory: Path) -> Path:
        """Return the state directory of this rank in `directory`.

        Raises TargetError when that has the state of another number of ranks.
        """
        if not self.sharded:
            return directory
        names = [path.name for path in directory.glob("rank-*-of-*")]
        sizes = {int(found[1]) for name in names if (found := _NAME.fullmatch(name))}
        if others := sorted(sizes - {self.size}):
            raise TargetError(
                f"{directory}: has the state of {others[0]} ranks; this job has {self.size}. Use "
                "another directory, and load_state_dict with a checkpoint of state_dict()"
            )
        return directory / f"rank-{self.rank}-of-{self.size}"

    def gather(self, value: _T) -> list[_T]:
        """Return the `value` of each rank, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value)
        return found

    def each(self, what: Callable[[], _T]) -> _T:
        """Call `what` in each rank and return its result here.

        If it raises in any rank, all raise: that one its error, and the others RankError.
        """
        if self.size == 1:
            return what()
        error: Exception | None = None
        try:
            result = what()
        except Exception as caught:  # noqa: BLE001 -- the others must not wait for this rank
            error = caught
        failed = {
            rank: message
            for rank, message in enumerate(self.gather(error and f"{error}"))
            if message is not None
        }
        if error is not None:
            raise error
        if failed:
            rank, message = next(iter(failed.items()))
            raise RankError(f"rank {rank}: {message}", ranks=failed)
        return result

    def new_run(self) -> str:
        """Return a random name, the same in all ranks. Generations with another name are of another
        history, even if they have as many steps."""
        return self.gather(secrets.token_hex(4))[0]

    def common(self, offered: Mapping[_T, int | None]) -> dict[_T, int | None]:
        """Return what all ranks offer, in the order of rank 0.

        The value, the step of a pin, is None unless it is the same in all.
        """
        all_offered = self.gather(dict(offered))
        return {
            key: step if all(one[key] == step for one in all_offered) else None
            for key, step in all_offered[0].items()
            if all(key in one for one in all_offered)
        }


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
