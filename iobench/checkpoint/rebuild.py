"""The way back from the skeleton and the tensors of a file to a state; see `state_tree`.

PerRank: a part of the state that differs between the ranks of a job, such as an RNG state.
"""

from __future__ import annotations

import base64
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from iobench.checkpoint.ties import view_on
from iobench.errors import DataMismatchError
from iobench.formats.tensors import torch_dtype


@dataclass(frozen=True)
class PerRank:
    """Marks a value of a state that each rank saves for itself.

        ckpt.save_async({"model": model.state_dict(), "rng": PerRank(torch.get_rng_state())}, step)

    Everything else in a state must be equal on all ranks, DTensors excepted. A load at the same
    world size returns this rank's value. At another world size it returns a `SavedPerRank`: only
    the caller knows how to distribute such values over more or fewer ranks.
    """

    value: Any


@dataclass(frozen=True)
class SavedPerRank:
    """The values of all ranks of the save, by rank: of a `PerRank` loaded at another world size."""

    values: tuple[Any, ...]


def unflatten(
    skeleton: Any, tensors: Mapping[str, torch.Tensor], *, rank: int = 0, ranks: int = 1
) -> Any:
    """Return the state of `skeleton` on the leaves `tensors`. Inverse of `flatten`.

    Nothing is copied: tensors that shared a leaf share its memory again. A PerRank that `ranks`
    ranks saved becomes the value of `rank`, any other one a SavedPerRank. Raises DataMismatchError
    for a skeleton that `flatten` cannot have made.
    """
    with readable("the state's skeleton"):
        return _Unflattener(tensors, rank, ranks).decode(skeleton)


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Raise DataMismatchError with `where` for errors of the body, which reads a state's structure.

    A file with other content than a save writes can have the right checksum: that of an older or
    damaged program. The load then goes on to another checkpoint, as with other damage.
    """
    try:
        yield
    except DataMismatchError as error:
        raise DataMismatchError(f"{where}: {error}") from error
    except (
        *(ArithmeticError, AttributeError, LookupError),
        *(RuntimeError, TypeError, ValueError),  # RecursionError too
    ) as error:
        raise DataMismatchError(
            f"{where}: cannot be read ({type(error).__name__}: {error!s:.200})"
        ) from error


class _Unflattener:
    """Builds a state from a skeleton."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], rank: int, ranks: int) -> None:
        self._tensors, self._rank, self._ranks = tensors, rank, ranks

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if tag.startswith("$"):
            return _DECODERS[tag](self, value)
        leaves, decode = self._tensors, self.decode
        if set(map(type, value.values())) == {dict} and set(map(len, value.values())) == {1}:
            with suppress(KeyError):  # another tag, or no such leaf: said below
                names = map(_name_of, value.values())
                return dict(zip(value, map(leaves.__getitem__, names), strict=True))
        return {
            key: leaves[item["$tensor"]]  # most values: no call for each of them
            if type(item) is dict and len(item) == 1 and "$tensor" in item
            else decode(item)
            for key, item in value.items()
        }

    def pairs(self, listed: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, Any]]:
        return ((self.decode(key), self.decode(item)) for key, item in listed)

    def many(self, value: dict[str, Any]) -> dict[str, torch.Tensor]:
        prefix, *keys = value["$tensors"]
        names = [prefix + key for key in keys]
        return dict(zip(keys, map(self._tensors.__getitem__, names), strict=True))

    def ordered(self, value: dict[str, Any]) -> OrderedDict[Any, Any]:
        items = value["$ordered"]  # a dict if it is one of many tensors
        made = OrderedDict(self.decode(items) if type(items) is dict else self.pairs(items))
        vars(made).update(self.decode(value.get("attributes", {})))
        return made

    def per_rank(self, value: dict[str, Any]) -> Any:
        own = value["$per_rank"]
        if len(own) == self._ranks:
            return self.decode(own[self._rank])
        return SavedPerRank(tuple(map(self.decode, own)))

    def tensor(self, value: dict[str, Any]) -> torch.Tensor:
        leaf = self._tensors[value["$tensor"]]
        return view_on(leaf, value) if "stride" in value else leaf

    def array(self, value: dict[str, Any]) -> np.ndarray[Any, Any]:
        leaf = self._tensors[value["$array"]].contiguous().reshape(-1).view(torch.uint8)
        array: np.ndarray[Any, Any] = leaf.numpy().view(np.dtype(value["dtype"]))
        return array.reshape(value["shape"])


_name_of = operator.itemgetter("$tensor")
_DECODERS: dict[str, Callable[[_Unflattener, dict[str, Any]], Any]] = {
    "$tensor": _Unflattener.tensor,
    "$tensors": _Unflattener.many,
    "$array": _Unflattener.array,
    "$per_rank": _Unflattener.per_rank,
    "$ordered": _Unflattener.ordered,
    "$dict": lambda self, v: dict(self.pairs(v["$dict"])),
    "$tuple": lambda self, v: tuple(map(self.decode, v["$tuple"])),
    "$size": lambda _, v: torch.Size(v["$size"]),
    "$float": lambda _, v: float(v["$float"]),
    "$bytes": lambda _, v: base64.b64decode(v["$bytes"]),
    "$complex": lambda _, v: complex(*map(float, v["$complex"])),
    "$dtype": lambda _, v: torch_dtype(v["$dtype"]),
    "$device": lambda _, v: torch.device(v["$device"]),
    "$number": lambda _, v: np.frombuffer(bytes.fromhex(v["$number"]), np.dtype(v["dtype"]))[0],
}
