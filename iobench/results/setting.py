"""Setting: what was measured: a writer, its options and one value of each axis of a run.

The axes are declared here, once. Result records, reports, labels and CSV columns take their names,
their order and their defaults from `AxisValues`; see `iobench.bench.axes` for how to add one.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

__all__ = ["AXIS_NAMES", "AxisValues", "HasSetting", "Setting"]


def _axis(option: str, default: Any = None, *, of_restores: bool = False) -> Any:
    """A field of AxisValues: the option of `iobench run` that sets it, and its default."""
    return field(default=default, metadata={"option": option, "of_restores": of_restores})


@dataclass(frozen=True, kw_only=True)
class AxisValues:
    """One value of each axis. Records hold them as keys of their own, in this order.

    `format` is the serialization of the files and `granularity` how tensors are dealt to them,
    None for the workload's own; `restore_as` is what a restore brings, None for all; `numjobs`
    processes work at once. A new axis needs a default, so that older records still load.
    """

    flattened: ClassVar[bool] = True

    format: str | None = _axis("serializer")
    granularity: str | None = _axis("granularity")
    restore_as: str | None = _axis("restore-as", of_restores=True)
    numjobs: int = _axis("numjobs", default=1)

    def __post_init__(self) -> None:
        if self.numjobs < 1:
            raise ValueError(f"numjobs must be at least 1, and is {self.numjobs}")

    def of_saves(self) -> dict[str, Any]:
        """The axes of a save, by name. The others only say how a restore reads what was saved."""
        return {name: getattr(self, name) for name in _SAVED}

    def changed(self) -> list[str]:
        """The axes that differ from their defaults, as text."""
        return self.texts({name for name in _SHOWN if getattr(self, name) != _DEFAULTS[name]})

    def texts(self, names: Container[str] | None = None) -> list[str]:
        """`serializer=torch`, `numjobs=4`: the axes in `names`, or all, that have a value."""
        return [
            f"{_OPTIONS[name]}={getattr(self, name)}"
            for name in _SHOWN
            if (names is None or name in names) and getattr(self, name) is not None
        ]


_OPTIONS: Mapping[str, str] = {one.name: one.metadata["option"] for one in fields(AxisValues)}
_DEFAULTS: Mapping[str, Any] = {one.name: one.default for one in fields(AxisValues)}
_SAVED = tuple(one.name for one in fields(AxisValues) if not one.metadata["of_restores"])
AXIS_NAMES = tuple(_OPTIONS)
"""The axes in the order of the record."""
_SHOWN = (*_SAVED, *(name for name in AXIS_NAMES if name not in _SAVED))  # in the order of labels


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A writer with its options, at one value of each axis."""

    flattened: ClassVar[bool] = True

    writer: str
    options: Mapping[str, Any]
    axes: AxisValues = field(default_factory=AxisValues)

    @property
    def name(self) -> str:
        """The writer and its axes, without its options: `odirect granularity=blob`."""
        return " ".join([self.writer, *self.axes.changed()])

    def at(self, **axes: Any) -> Self:
        """The same writer and options at other values of the axes given."""
        return replace(self, axes=replace(self.axes, **axes))


class HasSetting:
    """Shortcuts of records whose field `setting` says what they measured."""

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
