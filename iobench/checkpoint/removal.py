"""Removing what is not needed any more, which never fails a save and never follows a link."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from iobench.errors import IobenchError, TransferError
from iobench.writers.local.deferred_free import remove_tree

__all__ = ["remove_all", "remove_entry", "warn_of"]

_Key = TypeVar("_Key")


def remove_entry(path: Path) -> None:
    """Remove what has the name `path`: a directory with all in it, of a link only the link.

    A checkpoint that was moved to another disk, with a link in its place, keeps its files there.
    Raises TransferError.
    """
    try:
        remove_tree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise TransferError.wrap(error, "removing", path) from error


def remove_all(removals: Mapping[_Key, Callable[[], None]]) -> dict[_Key, IobenchError]:
    """Do all `removals`; one that fails does not stop the others. Returns the errors."""
    failures: dict[_Key, IobenchError] = {}
    for key, remove in removals.items():
        try:
            remove()
        except IobenchError as error:
            failures[key] = error
    return failures


def warn_of(failures: Iterable[IobenchError]) -> None:
    """A RuntimeWarning that names what was not removed; none where nothing failed."""
    told = "; ".join(str(error) for error in failures)
    if told:
        warnings.warn(
            f"no longer needed, but cannot be removed and takes up space: {told}",
            RuntimeWarning,
            stacklevel=3,
        )
