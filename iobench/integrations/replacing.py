"""Replacing a stock function in every module that has it, and calls that bypass the replacement."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

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
        for name in [name for name, value in names.copy().items() if value is stock]:
            names[name] = ours
            replaced.append((names, name, stock))
    return replaced


def put_back(replaced: Iterable[Replaced]) -> None:
    for names, name, stock in replaced:
        names[name] = stock


class _Reasons(threading.local):
    value: tuple[str, ...] = ()


_reasons = _Reasons()


@contextmanager
def bypass(reason: str = "") -> Iterator[None]:
    """Let this thread's calls inside the block go to the stock functions.

    With a `reason` they may be calls of the user's code, such as a signal handler: `iobench exec`
    then counts them as calls of the stock functions with this reason.
    """
    before = _reasons.value
    _reasons.value = (*before, reason)
    try:
        yield
    finally:
        _reasons.value = before


def bypassed() -> bool:
    return bool(_reasons.value)


def bypass_reason() -> str:
    """Return the reason of the innermost bypass of this thread; "" without one."""
    return _reasons.value[-1] if _reasons.value else ""
