"""Conversion between the nested dicts of tensors in torch files and flat names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def nested(named: Mapping[str, Any]) -> dict[Any, Any]:
    """Return nested dicts for names such as `state/0/exp_avg`; digits become int keys."""
    root: dict[Any, Any] = {}
    for name, value in named.items():
        *parents, leaf = (int(p) if p.isdigit() else p for p in name.split("/"))
        inner = root
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[leaf] = value
    return root


def flat(given: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts under flat names: the inverse of `nested`."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def leaves(given: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the values of nested dicts, in their order."""
    for _, value in flat(given):
        yield value
