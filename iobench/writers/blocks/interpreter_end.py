"""The end of the interpreter: every save that was begun is finished, or the exit code is 120.

CPython refuses new futures first (3.12.0 to 3.12.2: new threads too), joins the threads that are
not daemons, calls the functions of atexit, kills the daemon threads and clears the modules. What
needs a daemon thread, such as a stream, can be finished by atexit and not later. `sys.exit` has
no effect there; the one documented way to an exit code is a flush of stdout or stderr that fails.
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

    `owner` is not kept alive. What `finish` raises is reported by `lost`.
    """
    _ending.owners[owner] = finish


def begun() -> bool:
    """Whether the functions of `at_end` are called, or were: no thread is waited for any more."""
    return _ending.begun


def lost(message: str) -> None:
    """Report a save that failed and that no caller can ask about: a warning, and exit code 120.

    The message is also the interpreter's last line on stderr.
    """
    if _ending.begun:
        _ending.report(message)
    else:
        _ending.lost.append(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


class _Ending:
    """What is left to do, and what was lost. A forked child has neither of its parent's."""

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
        for reference in reversed(self.owners.keyrefs()):  # other threads may still add some
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
    """Let no signal's handler raise SystemExit here: the interpreter ends already.

    It would cut a wait short, or leave a lock taken that the thread waited for needs. SIGINT still
    gives up what is not finished.
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
    """Stands for `sys.stderr`; the flush that the interpreter ends with fails: exit code 120."""

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
