"""Defers interrupts during a block that must not stop half-way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer Ctrl-C, SIGTERM and SIGHUP to the end of the block; the first one is raised there.

    Handlers are used, not a signal mask: a mask belongs to one thread, so the kernel delivers the
    signal to another thread and Python still interrupts the main one. Does nothing in other
    threads: Python runs signal handlers in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    before = {}
    try:
        for number in _HELD:
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # None: not set from Python
                before[number] = handler
                signal.signal(number, remember)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])
