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
import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted

_Owner = TypeVar("_Owner")

_owners: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()
_lost: list[str] = []
_begun = False


def at_end(owner: _Owner, finish: Callable[[_Owner], object]) -> None:
    """Call `finish(owner)` when the interpreter ends, the newest owner first.

    `owner` is held by a weak reference. Exceptions of `finish` are reported like `lost` does.
    """
    _owners[owner] = finish


def begun() -> bool:
    """Whether the calls of `at_end` functions have begun: no thread is awaited after that."""
    return _begun


def lost(message: str) -> None:
    """Report a failed save that no caller can find out about: a warning, and exit code 120.

    The message is also printed on stderr when the interpreter ends.
    """
    if _begun:
        _report(message)
    else:
        _lost.append(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def _end() -> None:
    """Called by atexit. Ctrl-C gives up what is not finished.

    A thread calls the functions, in which no signal handler runs: the SystemExit of a handler could
    end a wait early, or leave a lock locked that the awaited thread needs. Here it means nothing,
    as the interpreter is ending already.
    """
    global _begun
    _begun = True
    for message in _lost:
        _report(message)
    worker = Worker(target=_finish, name="iobench-end", daemon=True)
    try:
        with suppress(SystemExit, RuntimeError):
            worker.start()
        if worker.ident is None:
            _finish()
        with suppress(SystemExit):
            uninterrupted(worker.join, (SystemExit,))
    except KeyboardInterrupt as error:
        _report(repr(error))


def _finish() -> None:
    with suppress(KeyError):  # all are finished
        while True:
            owner, finish = _owners.popitem()
            try:
                finish(owner)
            except BaseException as error:  # noqa: BLE001 -- the exit code must say it
                _report(repr(error))


def _report(message: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"iobench: a save was lost: {message}\n")
    if not isinstance(sys.stderr, _Unflushable):
        sys.stderr = _Unflushable(sys.stderr)


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


def _forget() -> None:
    """A forked child has none of its parent's saves to finish."""
    global _owners, _begun
    _owners, _begun = weakref.WeakKeyDictionary(), False
    _lost.clear()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
