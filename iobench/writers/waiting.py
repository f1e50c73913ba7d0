"""Waits that Ctrl-C does not cut short: what is waited for still uses memory or a descriptor."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

__all__ = ["Worker", "end_workers", "start_workers", "uninterrupted"]


class Worker(threading.Thread):
    """A thread that is alive until it has ended, however often Ctrl-C meets `join`.

    CPython 3.11 and 3.12 take any other for ended once a join was interrupted: what is done about
    bpo-45274 releases the lock that the thread still holds.
    """

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._over.set()

    def start(self) -> None:
        """Raises RuntimeError where no thread is to be had, as at the interpreter's end."""
        if sys.is_finalizing():  # CPython 3.11 would wait for ever for the thread to begin
            raise RuntimeError("can't create new thread at interpreter shutdown")
        self._over = threading.Event()
        super().start()

    def join(self, timeout: float | None = None) -> None:
        if sys.is_finalizing():  # it was killed, whatever it was doing: it never sets `_over`
            return
        if self.ident is not None:  # is_alive has the same fault
            self._over.wait(timeout)
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


def uninterrupted(wait: Callable[[], None]) -> None:
    """`wait()` to its end. KeyboardInterrupt meanwhile has it called again, and is raised after."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            wait()
        except KeyboardInterrupt as error:
            interrupt = error
            continue
        break
    if interrupt is not None:
        raise interrupt
