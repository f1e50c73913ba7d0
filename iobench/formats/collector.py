"""collector_paused: makes many objects without runs of the garbage collector."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_pauses: list[None] = []
"""One for each body under way that has turned the collector off; shared by threads, no lock."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the automatic garbage collector in the body, which makes many objects that stay.

    CPython collects whenever the number of objects has grown by a quarter, and looks at every
    object of the process: half of the time of a load of 30,000 tensors. The pause is for all
    threads, so the body must end within seconds. A collector that was off stays off, unless
    another thread turned it off during the body. It is on in a child that is forked meanwhile.
    """
    if not gc.isenabled():
        yield
        return
    try:
        _pauses.append(None)
        gc.disable()
        yield
    finally:
        del _pauses[-1:]  # not pop: an interrupt may come before the append
        gc.enable()


def _resume_in_child() -> None:
    """Turn the collector on in a forked child, where the thread that would do so is missing."""
    if _pauses:
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_child)
