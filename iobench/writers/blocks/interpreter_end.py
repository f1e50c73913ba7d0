"""The end of the interpreter: finishes every save that has begun, or sets the exit code to 120.

At its end CPython does this, in order. It refuses new futures (3.12.0 to 3.12.2: new threads too),
joins the threads that are not daemons, calls the functions of atexit, kills the daemon threads and
clears the modules. An object that needs a daemon thread, such as a stream, must finish in atexit.
`sys.exit` has no effect there: the only documented way to set an exit code is a flush of stdout or
stderr that fails.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

__all__ = ["at_end", "begun", "lost"]

_Owner = TypeVar("_Owner")


def at_end(owner: _Owner, finish: Callable[[_Owner], None]) -> None:
    """Call `finish(owner)` when the interpreter ends, the newest owner first.

    `owner` is held by a weak reference. Exceptions of `finish` are reported like `lost` does.
    """
    _ending.owners[owner] = finish


def begun() -> bool:
    """Whether the calls of `at_end` functions have begun: no thread is awaited after that."""
    return _ending.begun


def lost(message: str) -> None:
    """Report a failed save that no caller can find out about: a warning, and exit code 120.

    The message is also printed on stderr when the interpreter ends.
    """
    if _ending.begun:
        _ending.report(message)
    else:
        _ending.lost.append(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


class _Ending:
    """The owners to finish and the lost saves. A forked child forgets those of its parent."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.owners: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = (
            weakref.WeakKeyDictionary()
        )
        self.lost: list[str] = []
        self.begun = False

    def end(self) -> None:
        """Called by atexit."""
        self.begun = True
        _quiet_handlers()
        for message in self.lost:
            self.report(message)
        for reference in reversed(self.owners.keyrefs()):  # a copy: other threads may add owners
            owner = reference()
            if owner is None:
                continue
            try:
                self.owners[owner](owner)
            except BaseException as error:  # noqa: BLE001 -- atexit would print it and exit with 0
                self.report(repr(error))

    def report(self, message: str) -> None:
        if sys.stderr is not None:
            sys.stderr.write(f"iobench: a save was lost: {message}\n")
        if not isinstance(sys.stderr, _Unflushable):
            sys.stderr = _Unflushable(sys.stderr)


def _quiet_handlers() -> None:
    """Suppress the SystemExit of signal handlers, as the interpreter is ending already.

    It could end a wait early, or leave a lock locked that the awaited thread needs. SIGINT still
    interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in signal.valid_signals() - {signal.SIGINT}:
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, _without_exit(handler))


def _without_exit(handler: Callable[[int, FrameType | None], Any]) -> Any:
    def handle(number: int, frame: FrameType | None) -> None:
        with suppress(SystemExit):
            handler(number, frame)

    return handle


class _Unflushable:
    """Replaces `sys.stderr`: the last flush of the interpreter fails, so the exit code is 120."""

    closed = False

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
        raise OSError("a save was lost")


_ending = _Ending()
atexit.register(_ending.end)
os.register_at_fork(after_in_child=_ending.forget)
