"""Removal of old checkpoints and leftovers. It never fails a save and never follows a link."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from iobench.errors import IobenchError, transfer_errors
from iobench.writers.local.deferred_free import remove_tree

__all__ = ["remove_all", "remove_entry", "warn_of"]

_Key = TypeVar("_Key")


def remove_entry(path: Path) -> None:
    """Remove the entry `path`: a directory with its contents, or only the link if it is one.

    A checkpoint that was moved to another disk and replaced by a link keeps its files there.
    Raises TransferError.
    """
    with transfer_errors("removing", path):
        remove_tree(path) if path.is_dir() else path.unlink()


def remove_all(removals: Mapping[_Key, Callable[[], None]]) -> dict[_Key, IobenchError]:
    """Call all `removals` and return the errors by key. A failure does not stop the others."""
    failures: dict[_Key, IobenchError] = {}
    for key, remove in removals.items():
        try:
            remove()
        except IobenchError as error:
            failures[key] = error
    return failures


def warn_of(failures: Iterable[IobenchError]) -> None:
    """Give a RuntimeWarning with what was not removed. Without failures, do nothing."""
    names = "; ".join(str(error) for error in failures)
    if names:
        warnings.warn(
            f"no longer needed, but cannot be removed and takes up space: {names}",
            RuntimeWarning,
            stacklevel=3,
        )
