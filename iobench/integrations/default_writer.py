"""The writer that calls take which name none: one for the whole process."""

from __future__ import annotations

import copy
import logging
import os
import threading

from iobench.errors import UnavailableError, UsageError
from iobench.writers import registry
from iobench.writers.base import Writer
from iobench.writers.config import is_path, load_writer

__all__ = [
    *("CONFIG", "EXEC", "WriterLike"),
    *("chosen_writer", "redirected_writer", "set_default_writer"),
]

WriterLike = Writer | str | os.PathLike[str]
"""A Writer, the name of one (`odirect,block_size=8MiB` with options), or the path of a config."""

EXEC = "IOBENCH_EXEC"
"""The variable by which `iobench exec` tells its processes the directory that has `CONFIG`."""
CONFIG = "writer.toml"
_UNSET = "hybrid"  # works wherever files can be made
_ENDED = "iobench exec has ended, and the file of its writer is gone."
_log = logging.getLogger("iobench")
_lock = threading.RLock()  # a signal handler that saves may come in
_default: Writer | None = None


def set_default_writer(writer: WriterLike | None) -> None:
    """Set what `iobench.torch` and `iobench.safetensors` use where no `writer` is given.

    A Writer, a name, or the path of a config; None for the one before any was set: `hybrid`, and
    under `iobench exec` its writer.
    Raises what `iobench.load_writer` does, and UsageError for a writer that keeps nothing.
    """
    global _default
    chosen = None if writer is None else _made(writer)
    with _lock:
        _default = chosen


def chosen_writer(writer: WriterLike | None = None) -> Writer:
    """`writer` as a Writer; without one the process's default.

    In a process that has outlived its `iobench exec` that is `hybrid` again; the logger `iobench`
    tells it.
    """
    global _default
    if writer is not None:
        return _made(writer)
    with _lock:
        if _default is None:
            config = _config_of_exec()
            if config and not os.path.exists(config):
                _log.warning("%s is used: %s", _UNSET, _ENDED)
                config = None
            _default = _made(config or _UNSET)
        return _default


def redirected_writer() -> Writer:
    """The process's default, for calls that `iobench exec` redirects.

    Raises UnavailableError when that has ended before the first of them: nobody asked for another.
    """
    config = _config_of_exec()
    if _default is None and config and not os.path.exists(config):
        remedy = "Let its command wait for this process."
        raise UnavailableError("the writer of iobench exec", _ENDED, remedy)
    return chosen_writer()


def _config_of_exec() -> str | None:
    """Where `iobench exec` says that its writer's file is; None where it runs nothing."""
    session = os.environ.get(EXEC)
    return os.path.join(session, CONFIG) if session else None


def _made(writer: WriterLike) -> Writer:
    made = writer if isinstance(writer, Writer) else _named(os.fspath(writer))
    if not made.stores:
        raise UsageError(f"writer {made.name!r} keeps nothing, so nothing could be loaded again")
    return made


def _named(text: str) -> Writer:
    """The writer of a path, or of a name and options as the command line takes them."""
    if is_path(text) or "," not in text:
        return load_writer(text)
    found = registry.parse_specs(text)
    if len(found) != 1:
        raise UsageError(f"writer {text!r}: names {len(found)} writers, one is wanted")
    return found[0]


def _after_fork() -> None:
    """A child makes threads, rings and connections of its own."""
    global _default, _lock
    _lock = threading.RLock()
    if _default is not None:
        _default = copy.copy(_default)


os.register_at_fork(after_in_child=_after_fork)
