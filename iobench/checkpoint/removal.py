"""Removal of old checkpoints and leftovers. It never fails a save and never follows a link."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from iobench.errors import IobenchError, transfer_errors
from iobench.writers.removal import remove_tree

__all__ = ["Backlog", "remove_all", "remove_entry", "warn_of"]

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


class Backlog(Generic[_Key]):
    """Removed checkpoints whose files still take up space. `remove` removes the files of one.

    With many of them a save removes only a few, so that it does not wait for all of them.
    """

    def __init__(self, remove: Callable[[_Key], None]) -> None:
        self._remove = remove
        self._keys: deque[_Key] = deque()
        self._reported: set[_Key] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[_Key]:
        return iter(tuple(self._keys))

    def add(self, key: _Key) -> None:
        """Add the files of one checkpoint. They are the first that `reduce` removes."""
        self._keys.append(key)

    def discard(self, key: _Key) -> None:
        """Remove the files of `key` now. Raises what `remove` raises; then they stay in here."""
        self._remove(key)
        self._keys.remove(key)

    def reduce(self, most: int, enough: Callable[[], bool] = lambda: True) -> list[IobenchError]:
        """Remove the files of at most `most` checkpoints, and then more until `enough()`.

        Returns the errors of those that cannot be removed, each once. They are tried again later.
        """
        new: list[IobenchError] = []
        for count in range(len(self._keys)):
            if not self._keys or (count >= most and enough()):  # a signal handler may save too
                break
            key = self._keys.pop()
            try:
                self._remove(key)
            except BaseException as error:
                self._keys.appendleft(key)
                if not isinstance(error, IobenchError):
                    raise
                new += [] if key in self._reported else [error]
                self._reported.add(key)
        return new


def warn_of(failures: Iterable[IobenchError]) -> None:
    """Give a RuntimeWarning with what was not removed. Without failures, do nothing."""
    names = "; ".join(dict.fromkeys(str(error) for error in failures))
    if names:
        warnings.warn(
            f"no longer needed, but cannot be removed and takes up space: {names}",
            RuntimeWarning,
            stacklevel=3,
        )
