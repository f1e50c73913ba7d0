"""Waits that no interrupt cuts short: what is waited for still uses memory or a descriptor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Worker", "uninterrupted"]


class Worker(threading.Thread):
    """A thread that is alive until it has ended, however often Ctrl-C meets `join`.

    CPython 3.11 and 3.12 take any other for ended once a join was interrupted: what is done about
    bpo-45274 releases the lock that the thread still holds. A forked child has none of its
    parent's threads: none is alive there, and `join` does not wait.
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

    @property
    def working(self) -> bool:
        """Whether it has been started and not ended. `is_alive` has the same fault as `join`."""
        return self.ident is not None and not self.over.is_set() and os.getpid() == self._pid

    def join(self, timeout: float | None = None) -> None:
        if os.getpid() != self._pid:
            return
        if self.ident is not None:
            self.over.wait(timeout)
        super().join(timeout)


def uninterrupted(
    wait: Callable[[], None],
    interrupts: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit),
) -> None:
    """`wait()` to its end. What interrupts it has it called again, and is raised after.

    SystemExit is what many a handler of SIGTERM raises. A RuntimeError is always raised at once:
    it would come again.
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
