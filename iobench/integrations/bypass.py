"""Bypass of the redirect: inside it, this thread's calls of redirected functions go to stock.

Used where iobench itself calls these functions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["bypass", "bypass_reason", "bypassed"]


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
    """Whether this thread is inside a bypass."""
    return bool(_reasons.value)


def bypass_reason() -> str:
    """Return the reason of the innermost bypass of this thread; "" without one."""
    return _reasons.value[-1] if _reasons.value else ""
