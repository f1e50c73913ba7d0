"""StagedCheckpoint: a checkpoint directory that is visible only when it is complete and durable.

The files are written to a hidden directory and synced, the manifest last. Then every directory is
synced, the hidden one is renamed, and the parent is synced. Before the rename no reader sees a part
of it. To replace a checkpoint, the two directories exchange names and the old one is removed.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, Self

from iobench import linux
from iobench.checkpoint.manifest import MANIFEST
from iobench.errors import TargetError, transfer_errors
from iobench.writers.local.directory_lock import DirectoryLock
from iobench.writers.local.new_file import sync_directory
from iobench.writers.removal import remove_all, remove_entry, warn_of

STAGING_SUFFIX = ".iobench-staging"

REPLACED_SUFFIX = f".replaced{STAGING_SUFFIX}"
"""Suffix of the temporary name of a replaced checkpoint, where an atomic exchange is missing."""

_SPARE = 4
"""Descriptors that a removal needs: two to list the directory, one per large file."""

_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


class Staged(Protocol):
    """A checkpoint that is being written. It becomes a checkpoint with `publish`."""

    @property
    def directory(self) -> str | Path:
        """Directory or prefix of its files until `publish`."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of these names, before `publish`. Raises TransferError."""

    def publish(self, manifest: Iterable[bytes]) -> None:
        """Make it a checkpoint, durable on return. `manifest` is JSON, in one part or in many."""


class StagedCheckpoint:
    """A hidden directory next to `final` for the files; `publish` renames it to `final`.

    Use it as a context manager. An exit without `publish` removes everything written. An exit after
    `publish` removes the replaced checkpoint; a RuntimeWarning names what cannot be removed. Raises
    TargetError when `final` exists and `replace` is false, and when `lock` is no longer the lock of
    its directory.
    """

    def __init__(
        self,
        final: str | Path,
        *,
        replace: bool = False,
        lock: DirectoryLock | None = None,
    ) -> None:
        self.final = Path(final)
        self.directory = self.final.with_name(
            f".{self.final.name}.{secrets.token_hex(4)}{STAGING_SUFFIX}"
        )
        self._replace, self._lock = replace, lock
        self._spare: list[int] = []

    def __enter__(self) -> Self:
        if os.path.lexists(self.final) and not self._replace:
            raise TargetError(f"{self.final} exists; a checkpoint never replaces another in place")
        self._check_lock()
        with transfer_errors("staging", self.directory):
            self.directory.mkdir()
            try:
                # A removal needs descriptors to list the directory. They are reserved here: a save
                # that fails because the process has no free descriptor must still clean up.
                for _ in range(_SPARE):
                    self._spare.append(os.open(self.directory, os.O_PATH | os.O_CLOEXEC))
            except BaseException:
                self._close_spare()
                self.directory.rmdir()
                raise
        return self

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with transfer_errors("removing", self.directory / name):
                (self.directory / name).unlink()

    def _check_lock(self) -> None:
        if self._lock:
            self._lock.check()

    def _close_spare(self) -> None:
        while self._spare:
            os.close(self._spare.pop())

    def publish(self, manifest: Iterable[bytes]) -> None:
        """Write the manifest and rename the directory. On return the checkpoint is durable.

        The files must be synced already; this syncs the directories. Raises TransferError; then
        the previous checkpoint, if any, is still visible, and no part of this one.
        """
        self._check_lock()  # again: a writer recreates directories that were removed since
        with transfer_errors("committing", self.final):
            self._write_manifest(manifest)
            for directory, _, _ in os.walk(self.directory, topdown=False, onerror=reraise):
                sync_directory(directory)
            replaces = self._replace and os.path.lexists(self.final)
            self._exchange() if replaces else self.directory.rename(self.final)
            try:
                sync_directory(self.final.parent)
            except OSError:  # the rename may not be durable: undo it
                self._exchange() if replaces else self.final.rename(self.directory)
                raise

    def _exchange(self) -> None:
        aside = self.final.with_name(f".{self.final.name}{REPLACED_SUFFIX}")
        exchange(self.directory, self.final, aside)

    def _write_manifest(self, manifest: Iterable[bytes]) -> None:
        with (self.directory / MANIFEST).open("xb") as file:
            file.writelines(manifest)
            file.flush()
            os.fsync(file.fileno())

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
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
    """Exchange the names `new` and `final`: atomically if the file system can, else via `aside`."""
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
    """Raise `error`. os.walk skips a directory that it cannot list, which would stay unsynced."""
    raise error


def put_back(aside: Path) -> None:
    """Rename a replaced checkpoint back to its name, if no new checkpoint has that name."""
    final = aside.with_name(aside.name.removeprefix(".").removesuffix(REPLACED_SUFFIX))
    if not final.exists():
        aside.rename(final)
        sync_directory(final.parent)
