"""Tuned: where a writer's settings come from, as the table [tuned] of its file tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from iobench.errors import OptionError, UnknownNameError

__all__ = ["Tuned"]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What `iobench autotune` measured before it chose. For people, but for `fingerprint`.

    `fingerprint` is that of the machine (`iobench.environment.machine_fingerprint`), `target` the
    directory or prefix that was tuned for, `--s3-local` where its server ended with the tuning.
    `median` and `interval` are what the objective is about, in words with units, of `samples`
    confirmations of `size_bytes`. `ratio` says how many times better than `baseline` the setting
    is, with its 95 % interval, `over_runner_up` likewise; None where there is nothing to compare
    with. `paths` are those that its bytes took, `verdict` is that of the samples (docs/results.md).
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
        """From the table of a file. Raises UnknownNameError, OptionError."""
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
        """What is known, in order."""
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
