"""Replacing a function in every module that has it, and putting it back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

__all__ = ["Replaced", "put_back", "replace"]

Replaced = tuple[dict[str, Any], str, Any]
"""The names of a module, the one that was replaced, and what it was."""


def replace(
    stock: Callable[..., Any], ours: Callable[..., Any], *more: ModuleType
) -> list[Replaced]:
    """Put `ours` in place of `stock` in every imported module, by whatever name it has there.

    `more` are modules that are not in `sys.modules` yet, such as one being imported.
    """
    places = []
    for module in [*more, *sys.modules.values()]:
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):  # sys.modules may hold any object
            continue
        for name in [name for name, value in list(names.items()) if value is stock]:
            names[name] = ours
            places.append((names, name, stock))
    return places


def put_back(replaced: Iterable[Replaced]) -> None:
    """Undo `replace`."""
    for names, name, stock in replaced:
        names[name] = stock
