"""What to call the settings of a run: the writer, and the options in which its settings differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from iobench.units import format_size_exact

__all__ = ["Setting", "labels"]


class Setting(Protocol):
    """A writer with its options."""

    @property
    def writer(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]: ...


def labels(settings: Iterable[Setting]) -> list[str]:
    """Of each one its writer, with the options in which settings of that writer differ."""
    given = list(settings)
    same: dict[str, list[Mapping[str, Any]]] = {}
    for one in given:
        same.setdefault(one.writer, []).append(one.options)
    texts = []
    for one in given:
        others = same[one.writer]
        shown = [
            f"{name}={_option(name, value)}"
            for name, value in one.options.items()
            if any(name not in other or other[name] != value for other in others)
        ]
        texts.append(" ".join([one.writer, *shown]))
    return texts


def _option(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith(("size", "bytes")):
        return format_size_exact(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
