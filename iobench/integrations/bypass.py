"""Bypass of the redirect: inside it, this thread's calls of redirected functions go to stock.

Used where iobench itself calls these functions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["bypass", "bypassed"]


class _Depth(threading.local):
    value = 0


_depth = _Depth()


@contextmanager
def bypass() -> Iterator[None]:
    """Let this thread's calls inside the block go to the stock functions."""
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


def bypassed() -> bool:
    """Whether this thread is inside a bypass."""
    return _depth.value > 0
