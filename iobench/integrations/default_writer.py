"""The default writer of the process, which calls without a `writer` argument use."""

from __future__ import annotations

import copy
import logging
import os
import threading

from iobench.errors import UsageError
from iobench.writers.base import Writer
from iobench.writers.config import WriterLike, writer_of

EXEC = "IOBENCH_EXEC"
"""Environment variable of `iobench exec`: the directory that contains `CONFIG`."""
CONFIG = "writer.toml"
_UNSET = "hybrid"  # works wherever files can be created
_ENDED = "iobench exec has ended, and the file of its writer is gone."
_log = logging.getLogger("iobench")
_lock = threading.RLock()  # reentrant: a signal handler may save while this thread holds it
_default: Writer | None = None


def set_default_writer(writer: WriterLike | None) -> None:
    """Set the writer of `iobench.torch` and `iobench.safetensors` for calls without `writer`.

    `writer`: a Writer, a name, or the path of a config. None restores the initial default:
    `hybrid`, or the writer of `iobench exec`. Raises the errors of `iobench.load_writer`, and
    UsageError for a writer that stores nothing.
    """
    global _default
    chosen = None if writer is None else _made(writer)
    with _lock:
        _default = chosen


def chosen_writer(writer: WriterLike | None = None) -> Writer:
    """Return `writer` as a Writer; None means the default of the process.

    In a process that outlives its `iobench exec` the default is `hybrid`; the logger `iobench`
    reports that.
    """
    global _default
    if writer is not None:
        return _made(writer)
    with _lock:
        if _default is None:
            session = os.environ.get(EXEC)
            config = os.path.join(session, CONFIG) if session else _UNSET
            if session and not os.path.exists(config):
                _log.warning("%s is used: %s", _UNSET, _ENDED)
                config = _UNSET
            _default = _made(config)
        return _default


def _made(writer: WriterLike) -> Writer:
    made = writer_of(writer)
    if not made.stores:
        raise UsageError(f"writer {made.name!r} stores nothing; choose one that stores files")
    return made


def _after_fork() -> None:
    """Give a forked child a lock and a writer of its own.

    The parent's threads do not exist in the child, and it must not share io_uring rings and
    connections.
    """
    global _default, _lock
    _lock = threading.RLock()
    if _default is not None:
        _default = copy.copy(_default)


os.register_at_fork(after_in_child=_after_fork)
