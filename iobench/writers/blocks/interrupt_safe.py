"""Threads and waits that an interrupt does not end early.

A thread that is still running uses memory or a descriptor, which the caller must not free.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any


class Worker(threading.Thread):
    """A thread that counts as alive until it has ended, even if Ctrl-C interrupts `join`.

    CPython 3.11 and 3.12 consider a plain Thread ended after an interrupted join: the fix of
    bpo-45274 releases the lock that the thread still holds. A forked child has no threads of its
    parent: there no Worker is alive, and `join` does not wait.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.over = threading.Event()
        self._pid = os.getpid()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.over.set()

    def start(self) -> None:
        """Raises RuntimeError when no thread can start, for example at the interpreter's end."""
        if sys.is_finalizing():  # CPython 3.11 would wait forever for the thread to begin
            raise RuntimeError("can't create new thread at interpreter shutdown")
        super().start()

    @property
    def working(self) -> bool:
        """Whether the thread has started and not ended. `is_alive` has the same bug as `join`."""
        return self.ident is not None and not self.over.is_set() and os.getpid() == self._pid

    def join(self, timeout: float | None = None) -> None:
        # An interpreter that finalizes has killed its daemon threads: they never set `over`.
        if os.getpid() != self._pid or sys.is_finalizing():
            return
        if self.ident is not None:
            self.over.wait(timeout)
        super().join(timeout)


def uninterrupted(
    wait: Callable[[], None],
    interrupts: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit),
) -> None:
    """Call `wait()` until it returns. The first interrupt is raised after that.

    Handlers of SIGTERM often raise SystemExit. A RuntimeError is always raised at once: the next
    call would raise it again.
    """
    interrupt: BaseException | None = None
    while True:
        try:
            wait()
        except RuntimeError:
            raise
        except interrupts as error:
            interrupt = interrupt or error
            continue
        break
    if interrupt is not None:
        raise interrupt
