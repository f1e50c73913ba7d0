"""The files of a report: checks before the work, and writing them whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from iobench.errors import UsageError
from iobench.writers.local.new_file import write_bytes

__all__ = ["PAGE_SUFFIXES", "check_figure", "check_page", "write"]

PAGE_SUFFIXES = (".html", ".htm")
_MARK = b'name="generator" content="iobench report'
_HEAD_BYTES = 4096


def check_page(path: Path, option: str) -> None:
    """Raise UsageError for a page that cannot be written, or would replace another file."""
    _check(path, option, PAGE_SUFFIXES)
    if path.exists():
        with path.open("rb") as file:
            ours = _MARK in file.read(_HEAD_BYTES)
        if not ours:
            raise UsageError(f"{option} {path}: exists and is not a report; choose another name")


def check_figure(path: Path, option: str, form: str) -> None:
    """Raise UsageError for a picture that cannot be written. `form` is `svg` or `png`."""
    _check(path, option, (f".{form}",))


def write(path: Path, data: bytes, option: str) -> None:
    """Replace `path` with `data`, atomically; durable on return. Raises UsageError."""
    try:
        write_bytes(path, data)
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written ({error.strerror})") from error


def _check(path: Path, option: str, suffixes: tuple[str, ...]) -> None:
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{option} {path}: the name must end with {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}; make it first")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a directory; name a file")
    if not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        raise UsageError(f"{option} {path}: {path.parent.absolute()} is not writable")
