"""ShardRanks: the ranks of a job whose parameters are DTensors (FSDP2). Each keeps its own shards.

Nothing of them is gathered or sent: a rank has a state directory of its own. What the ranks agree
on is which step they are in. A step overwrites the slots of the generation before the last one, so
it begins only when the last one is durable in all ranks. However a job ends, all of them have one
generation in common then, and at most one more.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from iobench.checkpoint.ranked.structure import is_sharded, local_box
from iobench.errors import RankError, StateError, TargetError

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
        sharded: list[Any] = [one for one in parameters if is_sharded(one)]
        meshes = [one.device_mesh for one in sharded]
        self._device = meshes[0].device_type if meshes else None
        self.rank, self.size = 0, 1
        if meshes:
            self.rank = torch.distributed.get_rank()
            self.size = torch.distributed.get_world_size()

    @property
    def sharded(self) -> bool:
        """Whether the parameters are DTensors."""
        return self._device is not None

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

    def minimum(self, *values: int) -> list[int]:
        """Return the least of each value in all ranks."""
        if self.size == 1:
            return list(values)
        least = torch.tensor(values, dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        found: list[int] = least.tolist()
        return found

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
