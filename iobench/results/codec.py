"""Conversion of records to and from plain JSON values, by the fields and types of their classes.

No record has code of its own: declaring a field is enough to write, read and check it.
"""

from __future__ import annotations

import dataclasses
import os
from array import array
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from iobench.results.records import CeilingSample, End, Failure, Run, Sample, TrainBlock

SCHEMA = "iobench.result/1"
"""The schema of every record in a result file."""

Record: TypeAlias = Run | Sample | CeilingSample | Failure | TrainBlock | End
"""One line of a result file."""

KINDS: Mapping[str, type[Record]] = {
    kind.kind: kind for kind in (Run, Sample, CeilingSample, Failure, TrainBlock, End)
}
"""The classes of the records in a result file."""

_HOLDERS = ("measured", "save", "restore", "variants")
"""The fields of records that have flattened parts too."""

T = TypeVar("T")


def to_record(record: Any, schema: str = SCHEMA) -> dict[str, Any]:
    """Return `record` as plain JSON values, schema and kind first."""
    return {"schema": schema, "kind": record.kind, **to_plain(record)}


def from_record(values: Mapping[str, Any], kinds: Mapping[str, type] = KINDS) -> Any:
    """Return the record in `values`, one of `kinds`; unknown keys are ignored.

    A kind that is `dict` keeps the values as they are. Raises ValueError for another kind, a
    missing key or a value of the wrong type.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"kind {kind!r} is unknown; known are {', '.join(kinds)}")
    return values if kinds[kind] is dict else from_plain(kinds[kind], _nested(values))


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
            made = to_plain(part)
            plain |= made if getattr(part, "flattened", False) else {field.name: made}
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


def from_plain(kind: type[T], value: Any) -> T:
    """Make `kind`, a dataclass or another type, from plain JSON values; unknown keys are ignored.

    Raises ValueError for a missing key or a value of the wrong type, and says where it is.
    """
    return msgspec.convert(value, kind, str_keys=True)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with flattened parts as objects of their own: msgspec cannot flatten."""
    nested = {**values, "setting": {**values, "axes": values}, "axes": values}
    for name in _HOLDERS:
        part = values.get(name)
        if isinstance(part, dict):
            nested[name] = _nested(part)
        elif isinstance(part, list):
            nested[name] = [_nested(one) if isinstance(one, dict) else one for one in part]
    return nested
