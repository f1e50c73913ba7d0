"""Labels of the settings of a run: the writer, and the options and axes in which they differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from iobench.results.setting import AXES_IF_SET, AXIS_NAMES, AxisValues, Setting
from iobench.units import format_size_exact

__all__ = ["common_axes", "labels"]


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
