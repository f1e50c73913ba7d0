"""TreeSpec: the containers of a state and the kinds of their values, compared with a later state.

A spec is made while a state is flattened. `match` compares another state with it and collects the
tensors, arrays and plain values of that state in the same order. It compares everything that the
skeleton is made of: types of containers, keys with their types and order, and which values are
tensors or arrays. Plain values may differ: they are encoded again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from iobench.checkpoint.per_rank import PerRank
from iobench.formats.tensor_layouts import all_plain
from iobench.writers.image import Bytes

__all__ = [
    "TENSOR",
    "ArraySpec",
    "Collected",
    "DictSpec",
    "PerRankSpec",
    "PlainSpec",
    "SequenceSpec",
    "TreeSpec",
    "comparable_keys",
    "json_text",
    "quick_json_text",
]

json_text = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""Returns the JSON of an encoded value, without spaces."""


def quick_json_text(value: Any) -> str:
    """Return other JSON of an encoded value than `json_text`, in a tenth of the time.

    Other versions of msgspec may format numbers differently, so texts must not be compared.
    """
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json_text(value)


_KEYS = {str, int, bool, bytes, type(None)}


def comparable_keys(keys: Any) -> bool:
    """Whether equal keys of equal types are the same: not so for 0.0 and -0.0, nor in tuples."""
    return set(map(type, keys)) <= _KEYS


@dataclass(kw_only=True)
class Collected:
    """What `match` found in a state: `texts` are the plain values as JSON, by number.

    `encode` returns the JSON of a plain value at a path; None if there is a tensor or array in it.
    """

    encode: Callable[[Any, tuple[Any, ...]], str | None]
    tensors: list[torch.Tensor] = field(default_factory=list)
    arrays: list[Bytes] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)


class TreeSpec(Protocol):
    """A part of a state."""

    def match(self, value: Any, found: Collected) -> bool:
        """Collect the parts of `value`; return whether it has the same structure."""


class _TensorSpec:
    def match(self, value: Any, found: Collected) -> bool:
        found.tensors.append(value)
        return type(value) is torch.Tensor or all_plain([value])


TENSOR = _TensorSpec()


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpec:
    """A numpy array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def match(self, value: Any, found: Collected) -> bool:
        if type(value) is not np.ndarray or value.dtype != self.dtype or value.shape != self.shape:
            return False
        found.arrays.append(array_bytes(value))
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainSpec:
    """A value without tensors and arrays, in a container that has some."""

    number: int
    path: tuple[Any, ...]

    def match(self, value: Any, found: Collected) -> bool:
        text = found.encode(value, self.path)
        if text is None:
            return False
        found.texts[self.number] = text
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class PerRankSpec:
    """A PerRank, which may have no tensor or array in it."""

    child: TreeSpec

    def match(self, value: Any, found: Collected) -> bool:
        return type(value) is PerRank and self.child.match(value.value, found)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSpec:
    """A list, tuple or torch.Size."""

    kind: type
    children: list[TreeSpec]

    def match(self, value: Any, found: Collected) -> bool:
        if not isinstance(value, list | tuple) or type(value) is not self.kind:
            return False
        if len(value) != len(self.children):
            return False
        return all(child.match(one, found) for child, one in zip(self.children, value, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class DictSpec:
    """A dict or OrderedDict. `attributes` are those of an OrderedDict, if it has some.

    `children` is empty if all values are tensors.
    """

    kind: type
    keys: list[Any]
    key_kinds: list[type]
    children: list[TreeSpec]
    attributes: TreeSpec | None

    def match(self, value: Any, found: Collected) -> bool:
        if not isinstance(value, dict) or type(value) is not self.kind:
            return False
        if list(map(type, value)) != self.key_kinds or list(value) != self.keys:
            return False
        values = value.values()
        if not self.children:
            found.tensors.extend(values)
            if not all_plain(values):
                return False
        elif not all(
            child.match(one, found) for child, one in zip(self.children, values, strict=True)
        ):
            return False
        attributes: dict[str, Any] = getattr(value, "__dict__", {})
        if self.attributes is None or not attributes:
            return self.attributes is None and not attributes
        return self.attributes.match(dict(attributes), found)


def array_bytes(array: np.ndarray[Any, Any]) -> Bytes:
    """Return the bytes of an array, in place if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
