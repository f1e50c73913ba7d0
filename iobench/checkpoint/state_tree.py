"""A training state as JSON and tensors, and back. Never pickle.

`take_apart` turns nested dicts, lists, tuples, numbers, strings, None, torch tensors and numpy
arrays into a *skeleton*, which JSON can hold, and a list of named leaves, which a safetensors file
can. `put_together` is the inverse. What JSON has no word for is an object with one key that begins
with `$`: `{"$tensor": "model.weight"}`, `{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}`.
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from iobench.checkpoint.aliases import Leaf, View, share
from iobench.errors import DataMismatchError, StateError
from iobench.formats.tensors import dtype_name, resolved, torch_dtype

__all__ = ["TakenApart", "put_together", "take_apart"]

_ALLOWED = (
    "a state holds dicts, lists, tuples, numbers, strings, bytes, None, torch tensors and numpy "
    "arrays"
)


@dataclass(frozen=True, kw_only=True)
class TakenApart:
    """A state: `skeleton` is what JSON holds, `leaves` the tensors by name.

    `tensors` are the state's own by their names, several of which may lie in one leaf.
    """

    skeleton: Any = field(repr=False)
    leaves: dict[str, Leaf]
    tensors: dict[str, torch.Tensor] = field(repr=False)


def take_apart(state: Any) -> TakenApart:
    """The skeleton and the leaves of `state`. Tensors are not copied, everything else is.

    Names of leaves are their paths joined by dots. Tensors whose memory overlaps share a leaf, so
    that tied weights are saved once and come back tied. Raises StateError, which names the path,
    for an object that cannot be saved.
    """
    taking = _Taking()
    skeleton = taking.encode(state, ())
    leaves, views = share(taking.tensors)
    for entry, tensor_name in taking.entries:
        view = views.get(tensor_name)
        entry["$tensor"] = view.leaf if view else tensor_name
        if view and view.layout:
            entry.update(view.layout)
    leaves.update(taking.arrays)
    return TakenApart(skeleton=skeleton, leaves=leaves, tensors=taking.tensors)


class _Taking:
    """One walk through a state."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.arrays: dict[str, Leaf] = {}
        self.entries: list[tuple[dict[str, Any], str]] = []
        self._inside: set[int] = set()

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is torch.Tensor or _is_parameter(value):
            return self._tensor(value, path)
        if kind in _CONTAINERS:
            return self._container(value, path)
        if kind is np.ndarray:
            return self._array(value, path)
        if isinstance(value, np.generic):
            return self._number(value, path)
        encoder = _OTHERS.get(kind)
        if encoder:
            return encoder(value)
        raise StateError(
            f"{_shown(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint does "
            f"not hold; {_ALLOWED}"
        )

    def _container(self, value: Any, path: tuple[Any, ...]) -> Any:
        if id(value) in self._inside:
            raise StateError(f"{_shown(path)} holds itself")
        self._inside.add(id(value))
        try:
            if isinstance(value, dict):
                return self._dict(value, path)
            items = [self.encode(item, (*path, i)) for i, item in enumerate(value)]
            return items if isinstance(value, list) else {_TAGS[type(value)]: items}
        finally:
            self._inside.discard(id(value))

    def _dict(self, value: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        items = [
            (self._key(key, path), self.encode(item, (*path, key))) for key, item in value.items()
        ]
        if type(value) is OrderedDict:
            encoded: dict[str, Any] = {"$ordered": [list(pair) for pair in items]}
            if vars(value):  # the _metadata of Module.state_dict
                encoded["attributes"] = self.encode(dict(vars(value)), (*path, "__dict__"))
            return encoded
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(items)
        return {"$dict": [list(pair) for pair in items]}

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(key, tuple):
            return {"$tuple": [self._key(part, path) for part in key]}
        if key is None or type(key) in (bool, int, float, str, bytes):
            return self.encode(key, path)
        raise StateError(
            f"{_shown(path)} has the key {key!r}, a {type(key).__name__}; keys are strings, "
            "numbers, None, and tuples of those"
        )

    def _tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> Any:
        dense = tensor.layout == torch.strided and not tensor.is_nested
        if not dense or tensor.is_meta or tensor.is_quantized:
            what = "meta" if tensor.is_meta else "nested" if tensor.is_nested else tensor.layout
            raise StateError(
                f"{_shown(path)} is a {what} tensor of dtype {dtype_name(tensor.dtype)}; "
                "a checkpoint holds dense ones"
            )
        name = self._free_name(path)
        self.tensors[name] = resolved(tensor)
        entry: dict[str, Any] = {"$tensor": name}
        self.entries.append((entry, name))
        return entry

    def _array(self, array: np.ndarray[Any, Any], path: tuple[Any, ...]) -> Any:
        if not _is_plain(array.dtype):
            raise StateError(
                f"{_shown(path)} is a numpy array of {array.dtype}; a checkpoint holds arrays of "
                "numbers, texts and times"
            )
        name = self._free_name(path)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.arrays[name] = Leaf.of_bytes(flat, array.dtype, array.shape)
        return {"$array": name, "dtype": array.dtype.str, "shape": list(array.shape)}

    def _number(self, value: np.generic, path: tuple[Any, ...]) -> Any:
        if not _is_plain(value.dtype):
            raise StateError(f"{_shown(path)} is a numpy {value.dtype}, which cannot be saved")
        return {"$number": value.tobytes().hex(), "dtype": value.dtype.str}

    def _free_name(self, path: tuple[Any, ...]) -> str:
        """The path joined by dots; numbered where two paths give the same."""
        name = base = ".".join(map(str, path)) or "tensor"
        if base == "__metadata__":  # reserved by safetensors
            name = base = "tensor.__metadata__"
        number = 2
        while name in self.tensors or name in self.arrays:
            name, number = f"{base}#{number}", number + 1
        return name


def _is_parameter(value: Any) -> bool:
    """A Parameter with memory of its own: not one of a tensor subclass, nor a lazy one."""
    if not isinstance(value, torch.nn.Parameter) or is_lazy(value):
        return False
    return type(value.data) is torch.Tensor


def _is_plain(dtype: np.dtype[Any]) -> bool:
    if dtype.hasobject or dtype.names is not None or dtype.itemsize == 0:
        return False
    return np.dtype(dtype.str) == dtype  # no name of numpy's leads back to bfloat16 of ml_dtypes


_TAGS: dict[type, str] = {tuple: "$tuple", torch.Size: "$size"}
_CONTAINERS = (dict, OrderedDict, list, *_TAGS)
_OTHERS: dict[type, Callable[[Any], Any]] = {
    bytes: lambda v: {"$bytes": base64.b64encode(v).decode()},
    complex: lambda v: {"$complex": [repr(v.real), repr(v.imag)]},
    torch.dtype: lambda v: {"$dtype": dtype_name(v)},
    torch.device: lambda v: {"$device": str(v)},
}


def _shown(path: tuple[Any, ...]) -> str:
    return f"state[{']['.join(map(repr, path))}]" if path else "the state itself"


def put_together(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state of `skeleton`, its leaves being `tensors`. Raises DataMismatchError for nonsense.

    Nothing is copied: leaves that several places share are shared again.
    """
    try:
        return _Putting(tensors).decode(skeleton)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise DataMismatchError(
            f"the state's skeleton cannot be read ({type(error).__name__}: {error})"
        ) from error


class _Putting:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("$"):
            return {key: self.decode(item) for key, item in value.items()}
        return _DECODERS[tag](self, value)

    def pairs(self, listed: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, Any]]:
        return ((self.decode(key), self.decode(item)) for key, item in listed)

    def ordered(self, value: dict[str, Any]) -> OrderedDict[Any, Any]:
        made = OrderedDict(self.pairs(value["$ordered"]))
        vars(made).update(self.decode(value.get("attributes", {})))
        return made

    def tensor(self, value: dict[str, Any]) -> torch.Tensor:
        leaf = self._tensors[value["$tensor"]]
        return View.read(value).of(leaf) if "stride" in value else leaf

    def array(self, value: dict[str, Any]) -> np.ndarray[Any, Any]:
        leaf = self._tensors[value["$array"]].contiguous().reshape(-1).view(torch.uint8)
        array: np.ndarray[Any, Any] = leaf.numpy().view(np.dtype(value["dtype"]))
        return array.reshape(value["shape"])


_DECODERS: dict[str, Callable[[_Putting, dict[str, Any]], Any]] = {
    "$tensor": _Putting.tensor,
    "$array": _Putting.array,
    "$ordered": _Putting.ordered,
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
