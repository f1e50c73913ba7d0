"""Removal of a stored file, and of a directory with its content."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from iobench.errors import IobenchError, transfer_errors
from iobench.writers.base import Writer
from iobench.writers.local.deferred_free import freed_later
from iobench.writers.local.new_file import sync_directory
from iobench.writers.s3_store.target import S3Target, is_s3

_TRIES = 1000  # each finds fewer entries


def remove_file(path: str, writer: Writer) -> None:
    """Remove the file at `path`, in a directory or a bucket, durably. Raises OSError."""
    writer.check_scheme(path)
    if not is_s3(path):
        with freed_later([path]):
            os.unlink(path)
            sync_directory(os.path.dirname(path) or ".")
        return
    writer.objects(path).delete([S3Target.parse(path).key])


def remove_tree(directory: str | Path, *, last: str = "") -> None:
    """Remove `directory` and its content; free the space of large files in the background.

    Freeing starts when the whole tree is removed, as unlink waits while blocks are freed. Links are
    not followed: a link at `directory` is removed, and its destination stays. What another process
    removes at the same time is not an error. The file `last` of `directory` is removed after all
    others. Raises the OSError of the first entry that cannot be removed.
    """
    if os.path.islink(directory):
        os.unlink(directory)
        return
    existed = os.path.lexists(directory)
    with freed_later(entries_below(directory, OSError)):
        for left in reversed(range(_TRIES)):
            try:
                for entry in list(os.scandir(directory)) if last else ():
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry)
                    elif entry.name != last:
                        os.unlink(entry)
                shutil.rmtree(directory)
                return
            except FileNotFoundError:
                # Ranks remove their files of a failed save while rank 0 removes the directory.
                if existed and not os.path.lexists(directory):
                    return
                if not (existed and left):
                    raise


def entries_below(
    directory: str | os.PathLike[str], ignored: type[OSError] = FileNotFoundError
) -> Iterator[str]:
    """Yield the path of everything below `directory` except directories; follow no links.

    There may be 100,000. A directory whose listing raises `ignored` has no entries.
    """
    inner = []
    with suppress(ignored), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner.append(entry.path)
            else:
                yield entry.path
    for path in inner:
        yield from entries_below(path, ignored)


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
    names = "; ".join(dict.fromkeys(str(error) for error in failures))
    if names:
        warnings.warn(
            f"no longer needed, but cannot be removed and takes up space: {names}",
            RuntimeWarning,
            stacklevel=3,
        )
