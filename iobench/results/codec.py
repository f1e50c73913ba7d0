"""Conversion of records to and from plain JSON values, by the fields and types of their classes.

No record has code of its own: declaring a field is enough to write, read and check it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from iobench.results.records import CeilingSample, End, Failure, Run, Sample, TrainBlock

__all__ = ["SCHEMA", "Record", "decode", "from_plain", "from_record", "to_plain", "to_record"]

SCHEMA = "iobench.result/1"
"""The schema of every record in a result file."""

Record: TypeAlias = Run | Sample | CeilingSample | Failure | TrainBlock | End
"""One line of a result file."""

_FAMILY, _VERSION = SCHEMA.split("/")
_KINDS: dict[str, type[Record]] = {
    kind.kind: kind for kind in (Run, Sample, CeilingSample, Failure, TrainBlock, End)
}
_PLAIN = (bool, int, str)
_NOUNS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}

T = TypeVar("T")


def to_record(record: Record) -> dict[str, Any]:
    """Return `record` as plain JSON values, schema and kind first."""
    return {"schema": SCHEMA, "kind": record.kind, **to_plain(record)}


def from_record(values: Any) -> Record:
    """Return the record in `values`; unknown keys are ignored.

    Raises ValueError for another schema, a newer version, a missing key or a value of the wrong
    type.
    """
    schema = values.get("schema") if isinstance(values, dict) else None
    family, _, version = schema.partition("/") if isinstance(schema, str) else ("", "", "")
    if family != _FAMILY or not version.isdecimal():
        raise ValueError("not a record of an iobench result file")
    if int(version) > int(_VERSION):
        raise ValueError(
            f"written by a newer iobench (schema {schema}); upgrade iobench to read it"
        )
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"kind {kind!r} is unknown; known are {', '.join(_KINDS)}")
    return from_plain(_KINDS[kind], values)


def to_plain(value: Any) -> Any:
    """Return `value` with dataclasses and mappings as dict, tuples as list, paths as str.

    The fields of a flattened dataclass, such as Setting, become keys of the enclosing object. A
    field with the metadata IF_SET is left out where it is empty.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if dataclasses.is_dataclass(value):
        plain: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if field.metadata.get("if_set") and not part:
                continue
            plain |= to_plain(part) if _flattened(part) else {field.name: to_plain(part)}
        return plain
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}, which a record cannot hold")


def from_plain(kind: type[T], value: Any, where: str = "") -> T:
    """Make the dataclass `kind` from the JSON object `value`, checking every field.

    `where` is the path of the value, for messages. Raises ValueError.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the record'} must be an object, and is {value!r:.60}")  # noqa: TRY004 -- as documented
    given = {}
    for name, one, flattened, required in _fields(kind):  # type: ignore[arg-type]  # a class can be hashed
        if flattened:
            given[name] = from_plain(one, value, where)
        elif name in value:
            part = value[name]
            if not _stays(one, part):
                part = decode(one, part, f"{where}.{name}" if where else name)
            given[name] = part
        elif required:
            raise ValueError(f"{where}.{name} is missing" if where else f"{name} is missing")
    return kind(**given)


def _flattened(kind: Any) -> bool:
    """Whether the fields of the class, or of the object, become keys of the enclosing object."""
    return bool(getattr(kind, "flattened", False))


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


@cache
def _fields(kind: type) -> tuple[tuple[str, Any, bool, bool], ...]:
    """Name, type, whether flattened, and whether required, of each field."""
    types = get_type_hints(kind)
    missing = dataclasses.MISSING
    return tuple(
        (
            field.name,
            types[field.name],
            _flattened(types[field.name]),
            field.default is missing and field.default_factory is missing,
        )
        for field in dataclasses.fields(kind)
    )


@cache
def _unchanged(kind: Any) -> frozenset[type]:
    """The types of the JSON values that `decode` returns as they are."""
    origin, args = _parts(kind)
    parts = args if origin in (UnionType, Union) and NoneType in args else (kind,)
    return frozenset(part for part in parts if part in (*_PLAIN, float, NoneType))


def _stays(kind: Any, value: Any) -> bool:
    """Whether `decode` would return `value`: the quick answer for most of the half a million values
    of 10,000 samples."""
    own = type(value)
    return own in _unchanged(kind) and (own is not float or math.isfinite(value))


def decode(kind: Any, value: Any, where: str) -> Any:
    """Convert `value` to `kind`: plain type, Any, X | None, Literal, Mapping, tuple, dataclass.

    A Sequence becomes a tuple; a path (`str | Path`) stays text. `where` is the path of the value,
    for messages. Raises ValueError for another type.
    """
    if kind is Any or (kind in _PLAIN and type(value) is kind):
        return value
    origin, args = _parts(kind)
    if origin in (UnionType, Union):
        if set(args) == {str, Path}:
            return decode(str, value, where)
        (inner,) = (arg for arg in args if arg is not NoneType)
        return None if value is None else decode(inner, value, where)
    if dataclasses.is_dataclass(kind):
        return from_plain(kind, value, where)  # type: ignore[arg-type]  # checked above
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where} must be one of {', '.join(args)}, and is {value!r:.60}")
        return value
    if origin is Mapping and isinstance(value, dict):
        keys = map(int, value) if args[0] is int else value
        items = (
            item if _stays(args[1], item) else decode(args[1], item, f"{where}.{key}")
            for key, item in value.items()
        )
        return dict(zip(keys, items, strict=True))
    if kind is NoneType:
        if value is not None:
            raise ValueError(f"{where} must be empty, and is {value!r:.60}")
        return None
    if origin in (tuple, Sequence) and isinstance(value, list):
        if args[0] in _PLAIN and {args[0]}.issuperset(map(type, value)):
            return tuple(value)
        return tuple(decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    noun = _NOUNS.get(kind) or ("an object" if origin is Mapping else "a list")
    raise ValueError(f"{where} must be {noun}, and is {value!r:.60}")
