"""What to call the settings of a run: the writer, and the options and axes in which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from iobench.units import format_size_exact

__all__ = ["AXES", "Setting", "common_axes", "labels", "name_of"]

AXES = {
    "format": "serializer",
    "granularity": "granularity",
    "numjobs": "numjobs",
    "restore_as": "restore-as",
}
"""The fields of a sample that are axes of a run, and the options of `iobench run` that set them."""


class Setting(Protocol):
    """A writer with its options; it may have the fields of AXES too."""

    @property
    def writer(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]: ...


def labels(settings: Iterable[Setting]) -> list[str]:
    """Of each one its writer, with the options and axes in which settings of that writer differ."""
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
        differing = [field for field in AXES if len({_axis(o, field) for o in others}) > 1]
        texts.append(" ".join([one.writer, *shown, *_axes(one, differing)]))
    return texts


def name_of(setting: Setting) -> str:
    """Its writer and axes, where nothing is said of others: `odirect granularity=blob`."""
    fields = [field for field in AXES if (field, _axis(setting, field)) != ("numjobs", 1)]
    return " ".join([setting.writer, *_axes(setting, fields)])


def common_axes(settings: Iterable[Setting]) -> list[str]:
    """What `labels` leaves out as all settings that have it share it; a single process has none."""
    given = list(settings)
    shared = []
    for field, option in AXES.items():
        values = {_axis(one, field) for one in given} - {None}
        if len(values) == 1 and (field, values) != ("numjobs", {1}):
            shared.append(f"{option}={values.pop()}")
    return shared


def _axes(setting: Setting, fields: Iterable[str]) -> Iterator[str]:
    """`serializer=torch`, `numjobs=4`: those of `fields` that the setting has."""
    for field in fields:
        if (value := _axis(setting, field)) is not None:
            yield f"{AXES[field]}={value}"


def _axis(setting: Setting, field: str) -> Any:
    return getattr(setting, field, None)


def _option(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith(("size", "bytes")):
        return format_size_exact(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
