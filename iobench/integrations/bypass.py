"""Inside a bypass, redirected functions are the stock ones: for what iobench itself calls."""

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
    """Redirect nothing that this thread calls inside."""
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


def bypassed() -> bool:
    """Whether this thread is inside a bypass."""
    return _depth.value > 0
