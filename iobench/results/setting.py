"""Setting: a writer, its options and one value of each axis; what a record measures.

The axes are declared only here. Result records, reports, labels and CSV columns take names, order
and defaults from `AxisValues`. `iobench.bench.axes` explains how to add an axis.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from iobench.units import format_size_exact

IF_SET: Mapping[str, bool] = {"if_set": True}
"""Metadata of a field that a record has only where it is not empty."""


@dataclass(frozen=True, kw_only=True)
class AxisValues:
    """One value of each axis. In a record each axis is a key, in this order.

    `format`: serialization of the files. `granularity`: how tensors are distributed over files.
    None means the workload's own. `restore_as`: the part that a restore loads; None for all.
    `numjobs`: concurrent processes. `target`: the location, in runs of several targets; None and
    not written in runs of one. `restore_mode`: how ranks restore a replica together; None and not
    written where each restores files of its own. `slices`: which processes save the same bytes
    once; None and not written where each saves files of its own. `background`: what another process
    does at the same time, `restore`; None and not written where there is none. A new axis needs a
    default, so that older records still load.
    """

    flattened: ClassVar[bool] = True

    format: str | None = None
    granularity: str | None = None
    restore_as: str | None = None
    numjobs: int = 1
    target: str | None = field(default=None, metadata=IF_SET)
    restore_mode: str | None = field(default=None, metadata=IF_SET)
    slices: str | None = field(default=None, metadata=IF_SET)
    background: str | None = field(default=None, metadata=IF_SET)

    def __post_init__(self) -> None:
        if self.numjobs < 1:
            raise ValueError(f"numjobs must be at least 1, and is {self.numjobs}")

    def of_saves(self) -> dict[str, Any]:
        """Return the axes of a save, by name. The others only affect how a restore reads."""
        values = {name: getattr(self, name) for name in _SAVED}
        return {name: value for name, value in values.items() if value or name not in AXES_IF_SET}

    def changed(self) -> list[str]:
        """Return the axes that differ from their defaults, as text."""
        return self.texts({name for name in _SHOWN if getattr(self, name) != _DEFAULTS[name]})

    def texts(self, names: Container[str] | None = None) -> list[str]:
        """Return the axes in `names` (or all) that have a value, such as `numjobs=4`."""
        return [
            f"{_OPTIONS[name]}={getattr(self, name)}"
            for name in _SHOWN
            if (names is None or name in names) and getattr(self, name) is not None
        ]


_DEFAULTS: Mapping[str, Any] = {one.name: one.default for one in fields(AxisValues)}
AXIS_NAMES = tuple(_DEFAULTS)
"""The axes in the order of the record."""
AXES_IF_SET = tuple(one.name for one in fields(AxisValues) if one.metadata)
"""The axes that only some runs have. Their records and labels have them wherever they are set."""
_OPTIONS = {name: name.replace("_", "-") for name in AXIS_NAMES} | {"format": "serializer"}
_SAVED = tuple(name for name in AXIS_NAMES if name != "restore_as")
_SHOWN = (*_SAVED, "restore_as")  # in the order of labels


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A writer with its options, at one value of each axis."""

    flattened: ClassVar[bool] = True

    writer: str
    options: Mapping[str, Any]
    axes: AxisValues = field(default_factory=AxisValues)

    @property
    def name(self) -> str:
        """The writer and its axes without its options: `odirect granularity=blob`."""
        return " ".join([self.writer, *self.axes.changed()])

    @cached_property
    def contender(self) -> str:
        """A key that is equal for the same writer and options at the same axes of saves. Every
        judgement groups all samples by it."""
        whose = {"writer": self.writer, "options": self.options, **self.axes.of_saves()}
        return json.dumps(whose, sort_keys=True, default=_plain)

    def at(self, **axes: Any) -> Self:
        """Return the same writer and options with other values of the given axes."""
        return replace(self, axes=replace(self.axes, **axes))


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else os.fspath(value)


def at_target(name: str, target: str | None) -> str:
    """Return `name` with its target, if there are several, as in labels: `fio target=/mnt/a`."""
    return " ".join([name, *AxisValues(target=target).changed()])


class HasSetting:
    """Shortcuts for records with a field `setting`."""

    setting: Setting

    @property
    def writer(self) -> str:
        return self.setting.writer

    @property
    def options(self) -> Mapping[str, Any]:
        return self.setting.options

    @property
    def axes(self) -> AxisValues:
        return self.setting.axes


def labels(settings: Iterable[Setting]) -> list[str]:
    """Return for each setting its writer, and the options and axes that differ for that writer."""
    given = list(settings)
    same: dict[str, list[Setting]] = {}
    for one in given:
        same.setdefault(one.writer, []).append(one)
    texts = []
    for one in given:
        others = same[one.writer]
        shown = [
            f"{name}={_option(name, value)}"
            for name, value in one.options.items()
            if any(name not in other.options or other.options[name] != value for other in others)
        ]
        differing = [
            name for name in AXIS_NAMES if name in AXES_IF_SET or len(_values(others, name)) > 1
        ]
        texts.append(" ".join([one.writer, *shown, *one.axes.texts(differing)]))
    return texts


def common_axes(settings: Iterable[Setting]) -> list[str]:
    """Return the axes that `labels` omits because all settings share them, except defaults."""
    given = list(settings)
    values = {name: _values(given, name) - {None} for name in AXIS_NAMES if name not in AXES_IF_SET}
    shared = {name: found.pop() for name, found in values.items() if len(found) == 1}
    return AxisValues(**shared).changed()


def _values(settings: Iterable[Setting], name: str) -> set[Any]:
    return {getattr(one.axes, name) for one in settings}


def _option(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith(("size", "bytes")):
        return format_size_exact(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
