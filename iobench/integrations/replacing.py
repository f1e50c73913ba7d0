"""Replacing a function in every module that has it, and restoring it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

__all__ = ["Replaced", "put_back", "replace"]

Replaced = tuple[dict[str, Any], str, Any]
"""(namespace of a module, name in it, original function)."""


def replace(
    stock: Callable[..., Any], ours: Callable[..., Any], *more: ModuleType
) -> list[Replaced]:
    """Replace `stock` by `ours` in every imported module, under every name that it has there.

    `from torch import save` binds the function in the importing module too. `more` are modules that
    are not in `sys.modules` yet, such as one that is being imported.
    """
    replaced = []
    for module in [*more, *sys.modules.values()]:
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):  # sys.modules may hold any object
            continue
        for name in [name for name, value in list(names.items()) if value is stock]:
            names[name] = ours
            replaced.append((names, name, stock))
    return replaced


def put_back(replaced: Iterable[Replaced]) -> None:
    """Undo `replace`."""
    for names, name, stock in replaced:
        names[name] = stock
