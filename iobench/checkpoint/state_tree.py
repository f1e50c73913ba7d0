"""Conversion of a training state to JSON and named tensors, and back, without pickle.

`flatten` splits a state into a *skeleton* and named *leaves*. JSON stores the skeleton, a
safetensors file the leaves. A state has nested dicts, lists, tuples, numbers, strings, None, torch
tensors and numpy arrays. `unflatten` is the inverse. A value without a JSON type becomes an object
whose first key begins with `$`: `{"$tensor": "model.weight"}`, `{"$tuple": [...]}`,
`{"$dict": [[key, value], ...]}`.
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

__all__ = ["FlatState", "flatten", "unflatten"]

_ALLOWED = (
    "a state holds dicts, lists, tuples, numbers, strings, bytes, None, torch tensors and numpy "
    "arrays"
)


@dataclass(frozen=True, kw_only=True)
class FlatState:
    """A flattened state: `skeleton` for JSON, `leaves` by name for the tensor file.

    `tensors` are the tensors of the state by name. Several of them may share one leaf.
    """

    skeleton: Any = field(repr=False)
    leaves: dict[str, Leaf]
    tensors: dict[str, torch.Tensor] = field(repr=False)


def flatten(state: Any) -> FlatState:
    """Return the skeleton and the leaves of `state`. Everything except tensors is copied.

    The name of a leaf is its path, joined by dots. Tensors whose memory overlaps share a leaf, so
    tied weights are saved once and are tied again after a load. Raises StateError with the path of
    an object that cannot be saved.
    """
    flattener = _Flattener()
    skeleton = flattener.encode(state, ())
    leaves, views = share(flattener.tensors)
    for entry, tensor_name in flattener.entries:
        view = views.get(tensor_name)
        entry["$tensor"] = view.leaf if view else tensor_name
        if view and view.layout:
            entry.update(view.layout)
    leaves.update(flattener.arrays)
    return FlatState(skeleton=skeleton, leaves=leaves, tensors=flattener.tensors)


class _Flattener:
    """One traversal of a state: collects its tensors and arrays."""

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
            f"{_shown(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint "
            f"cannot hold; {_ALLOWED}"
        )

    def _container(self, value: Any, path: tuple[Any, ...]) -> Any:
        if id(value) in self._inside:
            raise StateError(f"{_shown(path)} contains itself")
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
                "a checkpoint holds dense tensors"
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
                "numbers, strings and times"
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
        """Return the path joined by dots, with a number appended when the name is taken."""
        name = base = ".".join(map(str, path)) or "tensor"
        if base == "__metadata__":  # reserved by safetensors
            name = base = "tensor.__metadata__"
        number = 2
        while name in self.tensors or name in self.arrays:
            name, number = f"{base}#{number}", number + 1
        return name


def _is_parameter(value: Any) -> bool:
    """Return whether `value` is a Parameter with its own memory: no tensor subclass, not lazy."""
    if not isinstance(value, torch.nn.Parameter) or is_lazy(value):
        return False
    return type(value.data) is torch.Tensor


def _is_plain(dtype: np.dtype[Any]) -> bool:
    if dtype.hasobject or dtype.names is not None or dtype.itemsize == 0:
        return False
    # A dtype of ml_dtypes, such as bfloat16, has no `str` that numpy turns back into it.
    return np.dtype(dtype.str) == dtype


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


def unflatten(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state of `skeleton` on the leaves `tensors`. Inverse of `flatten`.

    Nothing is copied: tensors that shared a leaf share its memory again. Raises DataMismatchError
    for a skeleton that `flatten` cannot have made.
    """
    try:
        return _Unflattener(tensors).decode(skeleton)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise DataMismatchError(
            f"the state's skeleton cannot be read ({type(error).__name__}: {error})"
        ) from error


class _Unflattener:
    """Builds a state from a skeleton."""

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


_DECODERS: dict[str, Callable[[_Unflattener, dict[str, Any]], Any]] = {
    "$tensor": _Unflattener.tensor,
    "$array": _Unflattener.array,
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
