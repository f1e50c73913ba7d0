"""Waits that no interrupt cuts short: what is waited for still uses memory or a descriptor."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

__all__ = ["Worker", "end_workers", "start_workers", "uninterrupted"]


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

    def start(self) -> None:
        """Raises RuntimeError where no thread can be started, as at the interpreter's end."""
        if sys.is_finalizing():  # CPython 3.11 would wait for ever for the thread to begin
            raise RuntimeError("can't create new thread at interpreter shutdown")
        super().start()

    @property
    def working(self) -> bool:
        """Whether it has been started and not ended. `is_alive` has the same fault as `join`."""
        return self.ident is not None and not self.over.is_set() and os.getpid() == self._pid

    def join(self, timeout: float | None = None) -> None:
        # A finalizing interpreter has killed its daemon threads: they never set `over`.
        if os.getpid() != self._pid or sys.is_finalizing():
            return
        if self.ident is not None:
            self.over.wait(timeout)
        super().join(timeout)


def start_workers(workers: Sequence[Worker]) -> list[Worker]:
    """Start `workers`; those that run. An ending interpreter may refuse them, none or all.

    The caller then does the work of those itself. Raises RuntimeError where threads are short.
    """
    started = []
    for worker in workers:
        try:
            worker.start()
        except RuntimeError as error:
            if "interpreter shutdown" not in str(error):
                raise
            break
        started.append(worker)
    return started


def end_workers(workers: Sequence[Worker], queue: SimpleQueue[Any]) -> None:
    """Have each find a None in the `queue` that it works off, and wait until all have ended.

    KeyboardInterrupt is raised when they have.
    """

    def end() -> None:
        for _ in workers:
            queue.put(None)
        for worker in workers:
            if worker.is_alive():  # one that could not be started is not
                worker.join()

    uninterrupted(end)


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
