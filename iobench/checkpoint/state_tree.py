"""Conversion of a training state to JSON and named tensors, and back, without pickle.

`flatten` splits a state into a *skeleton* and named *leaves*. JSON stores the skeleton, a
safetensors file the leaves. A state has nested dicts, lists, tuples, numbers, strings, None, torch
tensors and numpy arrays. A value without a JSON type becomes an object whose first key begins
with `$`: `{"$tensor": "model.weight"}`, `{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}`,
`{"$tensors": ["model.", "weight", "bias"]}`. `rebuild` has the way back.
"""

from __future__ import annotations

import base64
import json
import math
import operator
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from iobench.checkpoint.rebuild import PerRank
from iobench.checkpoint.ties import TiesAlike, ties_of, view_entry
from iobench.errors import StateError
from iobench.formats.safetensors_header import DTYPES
from iobench.formats.tensor_layouts import Located, TensorLayouts, all_plain
from iobench.formats.tensors import dtype_name, resolved, tensor_from_bytes, torch_dtype

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


def parsed(text: bytes | str, kind: Any = Any) -> Any:
    """Return the value of the type `kind` in JSON that a save has written."""
    with suppress(ValueError, RecursionError):  # such as half of a surrogate pair
        return msgspec.json.decode(text, type=kind)  # in half of the time of `json`
    return msgspec.convert(json.loads(text), kind)


_KEYS = {str, int, bool, bytes, type(None)}


def comparable_keys(keys: Any) -> bool:
    """Whether equal keys of equal types are the same: not so for 0.0 and -0.0, nor in tuples."""
    return set(map(type, keys)) <= _KEYS


@dataclass(kw_only=True)
class Collected:
    """What `match` found in a state: `texts` are the plain values as JSON, by number.

    `arrays` are the numpy arrays, as tensors on their memory.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    arrays: list[torch.Tensor] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)


class TreeSpec(Protocol):
    """The containers of a part of a state and the kinds of its values, of any later state.

    Types of containers, keys with their types and order, and which values are tensors or arrays
    must be the same. Plain values may differ: they are encoded again.
    """

    def match(self, value: Any, found: Collected) -> bool:
        """Collect the parts of `value` in order; return whether it has the same structure."""


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
        found.arrays.append(array_tensor(value))
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainSpec:
    """A value without tensors and arrays, in a container that has some."""

    number: int
    path: tuple[Any, ...]

    def match(self, value: Any, found: Collected) -> bool:
        text = plain_text(value, self.path)
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


def array_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array as a tensor, in place if it is contiguous and writable.

    It is one of bytes if safetensors lacks the dtype.
    """
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if not data.flags.writeable:  # torch has no such tensors
        data = data.copy()
    dtype = array.dtype
    if dtype.isnative and dtype.name in DTYPES:
        return tensor_from_bytes(data, torch_dtype(dtype.name), array.shape)
    return tensor_from_bytes(data, torch.uint8, (len(data),))


PlainValue = tuple[Any, Any]
"""A container of the skeleton, and the key or index of a plain value in it."""


@dataclass(frozen=True, kw_only=True)
class FlatState:
    """A flattened state: `skeleton` for JSON, and the tensors of the file.

    `tensors` are the tensors of the state by name, of `layouts`, and then its `array_count` numpy
    arrays as tensors. `ties` has the names of tensors that are not in the file, and of those that
    are in their place. `spec` describes the structure, with the `plain` values of the skeleton by
    number; it is None for a state that cannot be compared with another one.
    """

    skeleton: Any = field(repr=False)
    tensors: dict[str, torch.Tensor] = field(repr=False)
    array_count: int
    layouts: TensorLayouts = field(repr=False)
    located: Located = field(repr=False)
    ties: dict[str, str]
    spec: TreeSpec | None
    plain: list[PlainValue] = field(repr=False)
    per_rank: frozenset[int] = frozenset()
    """Numbers of the plain values that are inside of a PerRank."""

    def plain_texts(self) -> dict[int, str]:
        """Return the JSON of the plain values, by number."""
        return {at: json_text(container[key]) for at, (container, key) in enumerate(self.plain)}


class KnownState(NamedTuple):
    """A state of a known structure: `texts` are its plain values as JSON, by number.

    `tensors` are its tensors, and then its arrays as tensors on their memory.
    """

    texts: Mapping[int, str]
    tensors: list[torch.Tensor]
    located: Located


class Template:
    """What a state has in common with the next one of the same structure; no tensor, no value.

    `names` are those of all tensors, and then of the arrays.
    """

    def __init__(self, flat: FlatState) -> None:
        self.names = list(flat.tensors)
        self.tensor_count = len(flat.tensors) - flat.array_count
        self.layouts = flat.layouts
        self._ties = TiesAlike(flat.layouts, flat.located)
        self._spec = flat.spec
        if flat.spec is None:
            self.texts, self._order = [json_text(flat.skeleton)], list[int]()
            return
        mark, values = secrets.token_hex(16), [container[key] for container, key in flat.plain]
        for number, (container, key) in enumerate(flat.plain):
            container[key] = f"{mark}{number}"
        parts = re.split(f'"{mark}([0-9]+)"', quick_json_text(flat.skeleton))
        for (container, key), value in zip(flat.plain, values, strict=True):
            container[key] = value
        self.texts, self._order = parts[::2], list(map(int, parts[1::2]))

    @property
    def on_cpu(self) -> bool:
        """Whether all tensors are in host memory."""
        return self.layouts.on_cpu

    @property
    def comparable(self) -> bool:
        """Whether `find` can tell that a state has this structure."""
        return self._spec is not None

    def find(self, state: Any) -> KnownState | None:
        """Return what `state` has; None if its structure or the layout of a tensor is another one.

        Also if other tensors are tied, and for what `flatten` raises StateError.
        """
        found = Collected()
        try:
            if self._spec is None or not self._spec.match(state, found):
                return None
        except StateError:
            return None
        tensors = [*found.tensors, *found.arrays]
        located = self.layouts.locate(tensors)
        if located is None or not self._ties.alike(located):
            return None
        return KnownState(found.texts, tensors, located)

    def skeleton(self, texts: Mapping[int, str]) -> str:
        """Return the JSON of the skeleton with `texts` as the plain values, by number."""
        parts = [""] * (2 * len(self._order) + 1)
        parts[::2] = self.texts
        parts[1::2] = [texts[number] for number in self._order]
        return "".join(parts)


_ALLOWED = (
    "a state holds dicts, lists, tuples, numbers, strings, bytes, None, torch tensors, numpy "
    "arrays and iobench.PerRank"
)


def plain_text(value: Any, path: tuple[Any, ...]) -> str | None:
    """Return the JSON of `value`, which is at `path` of a state; None if it has tensors or arrays.

    Raises StateError like `flatten`.
    """
    flattener = _Flattener()
    encoded, _ = flattener.encode(value, path)
    return None if flattener.tensors or flattener.arrays or flattener.plain else json_text(encoded)


def flatten(
    state: Any, *, rank: int = 0, sharded: Sequence[Any] | None = None, compact: bool = False
) -> FlatState:
    """Return the skeleton and the tensors of `state`. Everything except tensors is copied.

    The name of a tensor is its path, joined by dots; inside of a PerRank it has the `rank`. Tensors
    of the same bytes are tied: they are saved once, and are tied again after a load. Tensors whose
    memory only overlaps are saved separately, like in stock DCP. `sharded` are the DTensors of
    which the tensors are parts, or None for each, in a file of DCP; a file of safetensors, without
    it, has tensors as bytes whose dtype that lacks. With `compact`, the skeleton has one entry for
    a dict of many tensors, `{"$tensors": [prefix of the names, key, key, ...]}`. Raises StateError
    with the path of an object that cannot be saved.
    """
    flattener = _Flattener(rank)
    skeleton, spec = flattener.encode(state, ())
    tensors, arrays = {**flattener.tensors, **flattener.arrays}, len(flattener.arrays)
    layouts = TensorLayouts([*tensors.values()])
    located = layouts.locate_same([*tensors.values()])
    if located is None:
        lost = (one for one in tensors if _without_storage(tensors[one]))
        raise StateError(f"{next(lost)}: its storage is smaller than the tensor")
    each = dict(zip(flattener.tensors, layouts.each, strict=False))
    ties = ties_of(each, located, sharded)
    views = [name for name, leaf in ties.items() if each[name] != each[leaf]]
    if sharded is None:
        views += [name for name, layout in each.items() if layout.dtype_name not in DTYPES]
    for name, leaf in ties.items():
        flattener.entries[name]["$tensor"] = leaf
    for name in views:
        flattener.entries[name].update(view_entry(each[name], each[ties.get(name, name)]))
    return FlatState(
        skeleton=_compacted(skeleton) if compact else skeleton,
        tensors=tensors,
        array_count=arrays,
        layouts=layouts,
        located=located,
        ties=ties,
        spec=spec if flattener.comparable else None,
        plain=flattener.plain,
        per_rank=frozenset(flattener.per_rank),
    )


def _without_storage(tensor: torch.Tensor) -> bool:
    return TensorLayouts([tensor]).locate_same([tensor]) is None


_Place = tuple[Any, Any, tuple[Any, ...]]
"""A container of the skeleton, a key or index in it, and the path in the state."""

_Encoded = tuple[Any, TreeSpec | None]
"""A value for the skeleton, and its spec; None if there is no tensor or array in it."""


class _Flattener:
    """One traversal of a state: collects its tensors and arrays."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.per_rank = rank, set[int]()
        self.tensors: dict[str, torch.Tensor] = {}
        self.arrays: dict[str, torch.Tensor] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        self.plain: list[PlainValue] = []
        self.comparable = True
        self._inside: set[int] = set()

    def encode(self, value: Any, path: tuple[Any, ...]) -> _Encoded:
        kind = type(value)
        if kind is torch.Tensor:  # first: a state may have 100,000
            return self._tensor(value, path)
        if kind in _JSON:
            return value, None
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}, None
        if kind is dict and _is_json(value):
            return dict(value), None
        if kind in _CONTAINERS:
            return self._container(value, path)
        if isinstance(value, torch.nn.Parameter) and all_plain([value]):
            return self._tensor(value, path)
        if kind is np.ndarray:
            return self._array(value, path)
        if kind is PerRank:
            return self._own(value, path)
        if isinstance(value, np.generic):
            return self._number(value, path), None
        encoder = _OTHERS.get(kind)
        if encoder:
            return encoder(value), None
        raise StateError(
            f"{_shown(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint "
            f"cannot hold; {_ALLOWED}"
        )

    def _own(self, value: PerRank, path: tuple[Any, ...]) -> _Encoded:
        before, path = len(self.plain), (*path, f"rank{self.rank}")
        encoded, spec = self.encode(value.value, path)
        own = [encoded]
        spec = self._plain(own, 0, path) if spec is None else spec
        self.per_rank.update(range(before, len(self.plain)))
        return {"$per_rank": own}, PerRankSpec(child=spec)

    def _container(self, value: Any, path: tuple[Any, ...]) -> _Encoded:
        if id(value) in self._inside:
            raise StateError(f"{_shown(path)} contains itself")
        self._inside.add(id(value))
        try:
            return self._dict(value, path) if isinstance(value, dict) else self._list(value, path)
        finally:
            self._inside.discard(id(value))

    def _list(self, value: Any, path: tuple[Any, ...]) -> _Encoded:
        kind, spec = type(value), None
        if _JSON.issuperset(map(type, value)):
            items = list(value)
        else:
            parts = [self.encode(item, (*path, i)) for i, item in enumerate(value)]
            items, specs = [one for one, _ in parts], [spec for _, spec in parts]
            children = self._children(specs, lambda at: (items, at, (*path, at)))
            spec = SequenceSpec(kind=kind, children=children) if children else None
        return items if kind is list else {_TAGS[kind]: items}, spec

    def _dict(self, value: dict[Any, Any], path: tuple[Any, ...]) -> _Encoded:
        kind, keys = type(value), list(value)
        names = [key if type(key) is str else self._key(key, path) for key in keys]
        parts = [self.encode(item, (*path, key)) for key, item in value.items()]
        specs = [spec for _, spec in parts]
        pairs = [[name, one] for name, (one, _) in zip(names, parts, strict=True)]
        plain = kind is dict and _STRINGS.issuperset(map(type, keys)) and not _any_tag(keys)
        items: Any = dict(pairs) if plain else pairs
        encoded = items if plain else {"$dict" if kind is dict else "$ordered": items}
        attributes = vars(value) if kind is OrderedDict else None
        if attributes:  # the _metadata of Module.state_dict
            encoded["attributes"], spec = self.encode(dict(attributes), (*path, "__dict__"))
            specs.append(spec)

        def place(at: int) -> _Place:
            if at == len(keys):
                return encoded, "attributes", (*path, "__dict__")
            container, key = (items, keys[at]) if plain else (pairs[at], 1)
            return container, key, (*path, keys[at])

        children = self._children(specs, place)
        if not children:
            return encoded, None
        self.comparable = self.comparable and comparable_keys(keys)
        last = children.pop() if attributes else None
        return encoded, DictSpec(
            kind=kind,
            keys=keys,
            key_kinds=list(map(type, keys)),
            children=[] if children.count(TENSOR) == len(children) else children,
            attributes=last,
        )

    def _children(
        self, specs: list[TreeSpec | None], place: Callable[[int], _Place]
    ) -> list[TreeSpec]:
        """Return the specs of the parts of one container; none if no part has a tensor or array.

        `place` returns the place of a part by number.
        """
        if specs.count(None) == len(specs):
            return []
        return [self._plain(*place(at)) if spec is None else spec for at, spec in enumerate(specs)]

    def _plain(self, container: Any, key: Any, path: tuple[Any, ...]) -> PlainSpec:
        self.plain.append((container, key))
        return PlainSpec(number=len(self.plain) - 1, path=path)

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(key, tuple):
            return {"$tuple": [self._key(part, path) for part in key]}
        if key is None or type(key) in (bool, int, float, str, bytes):
            return self.encode(key, path)[0]
        raise StateError(
            f"{_shown(path)} has the key {key!r}, a {type(key).__name__}; keys are strings, "
            "numbers, None, and tuples of those"
        )

    def _tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> _Encoded:
        dense = tensor.layout == torch.strided and not tensor.is_nested
        if not dense or tensor.is_meta or tensor.is_quantized:
            what = "meta" if tensor.is_meta else "nested" if tensor.is_nested else tensor.layout
            raise StateError(
                f"{_shown(path)} is a {what} tensor of dtype {dtype_name(tensor.dtype)}; "
                "a checkpoint holds dense tensors"
            )
        name = self._free_name(path)
        if tensor.is_conj() or tensor.is_neg():
            tensor = resolved(tensor)
        self.tensors[name] = tensor
        self.entries[name] = entry = {"$tensor": name}
        return entry, TENSOR

    def _array(self, array: np.ndarray[Any, Any], path: tuple[Any, ...]) -> _Encoded:
        if not _is_plain(array.dtype):
            raise StateError(
                f"{_shown(path)} is a numpy array of {array.dtype}; a checkpoint holds arrays of "
                "numbers, strings and times"
            )
        name = self._free_name(path)
        self.arrays[name] = array_tensor(array)
        entry = {"$array": name, "dtype": array.dtype.str, "shape": list(array.shape)}
        return entry, ArraySpec(dtype=array.dtype, shape=array.shape)

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


def _is_json(value: dict[Any, Any]) -> bool:
    """Whether a dict is the same in JSON: quick, as state_dict has one per module as metadata."""
    return (
        _JSON.issuperset(map(type, value.values()))
        and _STRINGS.issuperset(map(type, value))
        and not _any_tag(value)
    )


def _compacted(skeleton: Any) -> Any:
    """Return the skeleton with one entry for each dict of many whole tensors.

    Other containers stay the same objects: `plain` refers to them.
    """
    if isinstance(skeleton, list):
        skeleton[:] = map(_compacted, skeleton)
    elif isinstance(skeleton, dict):
        if (together := _together(skeleton)) is not None:
            return together
        for key, item in skeleton.items():
            pairs = item if key == "$ordered" else ()
            names = [name for name, _ in pairs if type(name) is str]
            listed = dict(pairs) if len(names) == len(pairs) and not _any_tag(names) else {}
            skeleton[key] = _together(listed) or _compacted(item)
    return skeleton


def _together(entries: dict[str, Any]) -> dict[str, Any] | None:
    """Return one entry for many whole tensors that are named by a prefix and their keys."""
    if len(entries) < _MANY or set(map(type, entries.values())) != {dict}:
        return None
    names = [one.get("$tensor", "") for one in entries.values() if len(one) == 1]
    prefix = names[0].removesuffix(next(iter(entries))) if names else ""
    same = names == [f"{prefix}{key}" for key in entries]
    return {"$tensors": [prefix, *entries]} if same else None


def _any_tag(keys: Iterable[str]) -> bool:
    return "\n$" in "\n" + "\n".join(keys) and any(map(_begins_with_tag, keys))


def _is_plain(dtype: np.dtype[Any]) -> bool:
    if dtype.hasobject or dtype.names is not None or dtype.itemsize == 0:
        return False
    # A dtype of ml_dtypes, such as bfloat16, has no `str` that numpy turns back into it.
    return np.dtype(dtype.str) == dtype


_MANY = 16

_JSON, _STRINGS = {bool, int, str, type(None)}, {str}
_begins_with_tag = operator.methodcaller("startswith", "$")
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
