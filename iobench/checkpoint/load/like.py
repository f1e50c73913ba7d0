"""Shardings of a load: the DTensors of the state `like` say which rank gets which part."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from iobench.checkpoint.load.stored import StoredState
from iobench.checkpoint.per_rank import PerRank
from iobench.checkpoint.ranked.stock_values import StatePath, name_of, shared_skeleton, stock_paths
from iobench.errors import StateMismatchError
from iobench.formats.tensors import dtype_name

__all__ = [
    *("Compared", "compare_state", "compared_with", "empty_local", "is_sharded", "local_box"),
    *("resharded", "sharded_like", "tensors_of"),
]


def is_sharded(value: Any) -> bool:
    """Whether a value is a DTensor. Without one, its module is not imported."""
    return isinstance(value, torch.Tensor) and hasattr(value, "placements")


def tensors_of(
    value: Any, path: StatePath = (), kinds: tuple[type, ...] = (torch.Tensor, np.ndarray)
) -> Iterator[tuple[StatePath, Any]]:
    """Yield the path and the value of every tensor and array of a state, without PerRank."""
    if isinstance(value, kinds):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, (*path, str(key)), kinds)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_of(item, (*path, number), kinds)


def compare_state(like: Any, state: Any, where: str) -> None:
    """Compare a state, still without its bytes, with `like`; see `compared_with`."""
    kinds = (torch.Tensor, np.ndarray, PerRank)
    expected = {path: _shown(value) for path, value in tensors_of(like, (), kinds)}
    # Of another world size, a PerRank has other values, or a list of them.
    own = {path for path, what in expected.items() if not what}
    found = {
        path: _shown(value)
        for path, value in tensors_of(state)
        if not own or not any(path[:length] in own for length in range(len(path) + 1))
    }
    _compare(like, {path: what for path, what in expected.items() if what}, found, where)


def _shown(value: Any) -> str:
    """Return dtype and shape of a tensor or an array, and "" for a PerRank."""
    if isinstance(value, PerRank):
        return ""
    dtype = dtype_name(value.dtype) if isinstance(value, torch.Tensor) else value.dtype
    return f"{dtype} {list(value.shape)}"


def _compare(
    like: Any, expected: Mapping[StatePath, str], found: Mapping[StatePath, str], where: str
) -> None:
    """Raise StateMismatchError unless they are equal, for the top-level entries of `like`."""
    if isinstance(like, dict):
        keys = set(map(str, like))
        found = {path: what for path, what in found.items() if not path or path[0] in keys}
    missing = [name_of(path) for path in expected if path not in found]
    unexpected = [name_of(path) for path in found if path not in expected]
    misshaped = {
        name_of(path): (what, found[path])
        for path, what in expected.items()
        if found.get(path, what) != what
    }
    if missing or unexpected or misshaped:
        raise StateMismatchError(where, missing=missing, unexpected=unexpected, misshaped=misshaped)


class Compared(NamedTuple):
    """The DTensors of `like` by the name of the saved tensor that they show.

    `gone` are the paths of saved tensors that only other ranks get.
    """

    sharded: dict[str, Any]
    gone: frozenset[StatePath]


def compared_with(
    like: Any, stored: StoredState, where: str, elsewhere: Collection[StatePath] = ()
) -> Compared:
    """Compare a checkpoint with `like`. `elsewhere` are the tensors of the other ranks' `like`.

    Raises StateMismatchError unless all tensors of `like` are in the checkpoint and the other way
    round, for the top-level entries of `like`, with equal dtypes and shapes. Those that another
    rank has may lack here. What is in a PerRank is not compared.
    """
    if like is None:
        return Compared({}, frozenset())
    saved = dict(stock_paths(shared_skeleton(stored.skeleton), []))
    expected = dict(tensors_of(like))
    gone = frozenset(path for path in saved if path in elsewhere and path not in expected)
    saved = {path: name for path, name in saved.items() if path not in gone}
    found = {}
    for path, name in saved.items():
        tensor = stored.tensors[name]
        found[path] = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
    wanted = {
        # The bytes of an array are saved, perhaps with another dtype.
        path: found.get(path, "") if isinstance(value, np.ndarray) else _shown(value)
        for path, value in expected.items()
    }
    _compare(like, wanted, found, where)
    sharded = {saved[path]: value for path, value in expected.items() if is_sharded(value)}
    return Compared(sharded, gone)


def local_box(sharded: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes and offsets of the part of a DTensor that this rank holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = sharded.device_mesh
    if mesh.get_coordinate() is None:
        return (0,) * sharded.ndim, (0,) * sharded.ndim
    sizes, offsets = compute_local_shape_and_global_offset(sharded.shape, mesh, sharded.placements)
    return tuple(sizes), tuple(offsets)


def empty_local(sharded: Any) -> torch.Tensor:
    """Return new memory for this rank's part of a DTensor, on its device."""
    device = sharded._local_tensor.device
    if device.type == "meta":
        kind = sharded.device_mesh.device_type
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else kind
    return torch.empty(local_box(sharded)[0], dtype=sharded.dtype, device=device)


def sharded_like(sharded: Any, local: torch.Tensor) -> Any:
    """Return a DTensor with the sharding of `sharded` on the memory `local`. No collective."""
    from torch.distributed.tensor import DTensor

    whole = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
    return DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def resharded(state: Any, like: Any) -> Any:
    """Return `state` with the full tensors replaced by DTensors where `like` has some."""
    return _Resharded().of(state, like)


class _Resharded:
    """Makes the DTensors of one state. Tied tensors stay tied."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def of(self, state: Any, like: Any) -> Any:
        if isinstance(state, torch.Tensor):
            if not is_sharded(like):
                return state
            key = id(state), like._spec
            if key not in self._made:
                self._made[key] = _part_of(state, like)
            return self._made[key]
        if isinstance(like, PerRank):
            return self.of(state, like.value)
        if isinstance(like, Mapping) and isinstance(state, dict):
            for key in state.keys() & like.keys():
                state[key] = self.of(state[key], like[key])
        elif (
            isinstance(like, list | tuple)
            and type(state) in (list, tuple)
            and len(like) == len(state)
        ):
            pairs = zip(state, like, strict=True)
            return type(state)(self.of(one, other) for one, other in pairs)
        return state


def _part_of(full: torch.Tensor, sharded: Any) -> Any:
    local, part = empty_local(sharded), full
    for dim, (size, begin) in enumerate(zip(*local_box(sharded), strict=True)):
        part = part.narrow(dim, begin, size)
    local.copy_(part)
    return sharded_like(sharded, local)
