"""Nested dicts of tensors, as torch files hold them, and the flat names that stand for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["flat", "leaves", "nested"]


def nested(named: Mapping[str, Any]) -> dict[Any, Any]:
    """`state/0/exp_avg` as nested dicts, digits being int keys."""
    root: dict[Any, Any] = {}
    for name, value in named.items():
        *parents, leaf = (int(p) if p.isdigit() else p for p in name.split("/"))
        inner = root
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[leaf] = value
    return root


def flat(given: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dicts under the names that `nested` took apart."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def leaves(given: Mapping[Any, Any]) -> Iterator[Any]:
    """The values of nested dicts, in their order."""
    for _, value in flat(given):
        yield value
