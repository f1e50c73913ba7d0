"""Tuned: the origin of a writer's settings, from the table [tuned] of its TOML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from iobench.errors import OptionError, UnknownNameError

__all__ = ["Tuned"]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The measurements of `iobench autotune` for its choice. Programs read only `fingerprint`.

    `fingerprint` identifies the machine (`iobench.environment.machine_fingerprint`). `target` is
    the directory or prefix that was tuned.
    `median` and `interval` are texts with units: the objective in `samples` confirmations of
    `size_bytes`. `ratio` says how many times better than `baseline` the setting is, with a 95%
    interval; `over_runner_up` compares it with the second best. They are None without such a
    setting. `paths` are those that the bytes took. `verdict` judges the samples (docs/results.md).
    """

    date: str
    iobench: str
    workload: str
    objective: str
    target: str
    storage: str
    machine: str
    fingerprint: str
    size_bytes: int
    samples: int
    median: str
    interval: str
    paths: tuple[str, ...] = ()
    finding: str
    verdict: str | None = None
    baseline: str | None = None
    ratio: float | None = None
    ratio_interval: tuple[float, ...] | None = None
    runner_up: str | None = None
    over_runner_up: float | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Tuned:
        """Make it from the table of a file. Raises UnknownNameError, OptionError."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in values:
            if name not in fields:
                raise UnknownNameError("key of [tuned]", name, fields)
        missing = [
            name
            for name, field in fields.items()
            if name not in values and field.default is dataclasses.MISSING
        ]
        if missing:
            raise OptionError(f"[tuned] lacks {', '.join(missing)}")
        kinds = get_type_hints(cls)
        return cls(**{name: _typed(name, kinds[name], value) for name, value in values.items()})

    def items(self) -> list[tuple[str, Any]]:
        """Return the names and values that are not None, in order."""
        named = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [(name, value) for name, value in named if value is not None]


def _typed(name: str, kind: Any, value: Any) -> Any:
    text = str(kind)
    if "tuple" in text:
        inner = str if "tuple[str" in text else (int, float)
        if isinstance(value, list) and all(_is(item, inner) for item in value):
            return tuple(value)
    elif kind is int and _is(value, int):
        return value
    elif "float" in text and _is(value, (int, float)):
        return float(value)
    elif "str" in text and isinstance(value, str):
        return value
    raise OptionError(f"[tuned] {name} = {value!r}: is not what iobench autotune writes there")


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
