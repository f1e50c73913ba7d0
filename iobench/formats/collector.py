"""collector_paused: makes many objects without runs of the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the automatic garbage collector in the body, which makes many objects that stay.

    CPython collects whenever the number of objects has grown by a quarter, and looks at every
    object of the process: half of the time of a load of 30,000 tensors. The pause is for all
    threads, so the body must end within seconds. A collector that was off stays off, unless
    another thread turned it off during the body.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()
