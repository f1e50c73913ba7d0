"""StagedCheckpoint: a checkpoint directory, visible only when it is complete and durable.

Written aside, every file synced, the manifest last, every directory synced, renamed, the parent
directory synced. Whatever happens before the rename, nobody sees a part of it. Where it replaces
another the two exchange their names, and the other is removed then.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from iobench import linux
from iobench.checkpoint.lock import DirectoryLock
from iobench.checkpoint.removal import remove_all, remove_entry, warn_of
from iobench.errors import TargetError, TransferError
from iobench.writers.local.new_file import sync_directory

__all__ = [
    "MANIFEST",
    "REPLACED_SUFFIX",
    "STAGING_SUFFIX",
    "Staged",
    "StagedCheckpoint",
    "exchange",
    "put_back",
    "reraise",
]

MANIFEST = "manifest.json"
"""The file that says what a checkpoint holds; written last."""

STAGING_SUFFIX = ".iobench-staging"

REPLACED_SUFFIX = f".replaced{STAGING_SUFFIX}"
"""Of the name that a checkpoint has for a moment, where names cannot be exchanged at once."""

_SPARE = 4
"""Descriptors that a removal takes: two to list the directory, one for each file that is large."""

_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


class Staged(Protocol):
    """A checkpoint being written; not one before `publish`."""

    @property
    def directory(self) -> str | Path:
        """Where its files go until it is published."""

    def publish(self, manifest: Mapping[str, Any]) -> None:
        """Make it a checkpoint: durable and visible on return."""


class StagedCheckpoint:
    """A directory beside `final` to write files into; `publish` makes it `final`.

    As a context manager: left without `publish`, everything written is removed; else what it
    replaced, and a RuntimeWarning says what of that cannot be. Raises TargetError when `final`
    exists already, unless with `replace`, and when `lock` is no longer that of its directory.
    """

    def __init__(
        self, final: str | Path, *, replace: bool = False, lock: DirectoryLock | None = None
    ) -> None:
        self.final = Path(final)
        self.directory = self.final.with_name(
            f".{self.final.name}.{secrets.token_hex(4)}{STAGING_SUFFIX}"
        )
        self._replace, self._lock, self._published = replace, lock, False
        self._spare: list[int] = []

    def __enter__(self) -> Self:
        if os.path.lexists(self.final) and not self._replace:
            raise TargetError(f"{self.final} exists; a checkpoint never replaces another in place")
        self._check_lock()
        try:
            self.directory.mkdir()
            try:
                # Listing what is to be removed takes descriptors, and a save that fails because
                # the process has none left could not remove what it has written.
                for _ in range(_SPARE):
                    self._spare.append(os.open(self.directory, os.O_PATH | os.O_CLOEXEC))
            except BaseException:
                self._close_spare()
                self.directory.rmdir()
                raise
        except OSError as error:
            raise TransferError.wrap(error, "staging", self.directory) from error
        return self

    def _check_lock(self) -> None:
        if self._lock:
            self._lock.check()

    def _close_spare(self) -> None:
        while self._spare:
            os.close(self._spare.pop())

    def publish(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest and give the directory its name. On return all of it is durable.

        The files must be synced already; their names and the directories' are synced here.
        Raises TransferError; nothing is visible then, or what was there before.
        """
        self._check_lock()  # again: a writer makes directories that were removed meanwhile
        try:
            self._write_manifest(manifest)
            for directory, _, _ in os.walk(self.directory, topdown=False, onerror=reraise):
                sync_directory(directory)
            replaces = self._replace and os.path.lexists(self.final)
            self._exchange() if replaces else self.directory.rename(self.final)
            try:
                sync_directory(self.final.parent)
            except OSError:  # the name may not last: it is taken back
                self._exchange() if replaces else self.final.rename(self.directory)
                raise
            self._published = True
        except OSError as error:
            raise TransferError.wrap(error, "committing", self.final) from error

    def _exchange(self) -> None:
        aside = self.final.with_name(f".{self.final.name}{REPLACED_SUFFIX}")
        exchange(self.directory, self.final, aside)

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        with (self.directory / MANIFEST).open("x") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_spare()
        failures = remove_all({"": self._remove})
        if error is None:
            warn_of(failures.values())
        for failure in failures.values():
            if error is not None:
                error.add_note(f"{self.directory}: could not be removed ({failure})")

    def _remove(self) -> None:
        if os.path.lexists(self.directory):
            remove_entry(self.directory)


def exchange(new: Path, final: Path, aside: Path) -> None:
    """`new` and `final` change names; at once where the file system can, else by way of `aside`."""
    try:
        linux.exchange_names(str(new), str(final))
    except OSError as error:
        if error.errno not in _CANNOT_EXCHANGE:
            raise
        final.rename(aside)
        try:
            new.rename(final)
        except BaseException:  # Ctrl-C too
            aside.rename(final)
            raise
        aside.rename(new)


def reraise(error: OSError) -> None:
    """For os.walk, which skips what it cannot list: what it skips here is not durable."""
    raise error


def put_back(aside: Path) -> None:
    """Give its name back to what bears REPLACED_SUFFIX, where nothing has come in its place."""
    final = aside.with_name(aside.name.removeprefix(".").removesuffix(REPLACED_SUFFIX))
    if not final.exists():
        aside.rename(final)
        sync_directory(final.parent)
