"""CheckpointStore: where the checkpoints of a run are, each under its step's name."""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

from iobench.checkpoint.lock import DirectoryLock, lock_directory
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.names import name_of, step_of
from iobench.checkpoint.removal import remove_all, remove_entry, warn_of
from iobench.checkpoint.staged import (
    MANIFEST,
    REPLACED_SUFFIX,
    STAGING_SUFFIX,
    Staged,
    StagedCheckpoint,
    put_back,
)
from iobench.errors import TargetError, TransferError
from iobench.writers.base import Writer
from iobench.writers.local.new_file import PART_SUFFIX, sync_directory
from iobench.writers.s3_store.target import is_s3

__all__ = ["CheckpointStore", "DirectoryStore", "store_at"]


class CheckpointStore(Protocol):
    """The checkpoints of one run."""

    def acquire(self) -> None:
        """Make the place, and let no other process save there. Raises TargetError for another's."""

    def release(self) -> None:
        """Let others save there. Twice does nothing."""

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, those that have a manifest, ascending."""

    def manifest(self, step: int) -> Manifest:
        """What the checkpoint holds. Raises DataMismatchError when the manifest is damaged."""

    def locate(self, step: int) -> str | Path:
        """Where the files of the checkpoint are."""

    def staged(self, step: int, *, replace: bool = False) -> AbstractContextManager[Staged]:
        """The new checkpoint; removed when the block is left without `publish`.

        With `replace` it may take the place of another, which stays until then and is removed
        after it; where it cannot be, a RuntimeWarning says so.
        """

    def remove(self, step: int) -> None:
        """Remove the checkpoint; from the first moment on it is none any more.

        One that another process has removed is as good.
        """

    def clean(self) -> None:
        """Remove what killed processes left half written, half removed or replaced.

        A RuntimeWarning names what cannot be removed.
        """


def store_at(location: str | Path, writer: Writer) -> CheckpointStore:
    """The store at a directory, or at `s3://bucket/prefix`. Raises UsageError for other writers."""
    writer.check_scheme(location)
    if is_s3(location):
        from iobench.checkpoint.object_store import ObjectStore

        return ObjectStore(str(location), writer)
    return DirectoryStore(Path(location))


class DirectoryStore:
    """Checkpoints in a directory; a half-written or half-removed one bears a hidden name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()  # whatever the process changes to
        self._lock: DirectoryLock | None = None

    def __str__(self) -> str:
        return str(self.directory)

    def acquire(self) -> None:
        self._lock = lock_directory(self.directory)

    def release(self) -> None:
        if self._lock:
            self._lock.release()

    def steps(self) -> list[int]:
        if not self.directory.is_dir():
            raise TargetError(f"{self.directory}: no such directory")
        try:
            found = ((step_of(path.name), path) for path in self.directory.iterdir())
            return sorted(
                step for step, path in found if step is not None and (path / MANIFEST).is_file()
            )
        except OSError as error:
            raise TransferError.wrap(error, "listing", self.directory) from error

    def manifest(self, step: int) -> Manifest:
        file = self.locate(step) / MANIFEST
        try:
            return Manifest.parse(file.read_bytes(), str(file))
        except OSError as error:
            raise TransferError.wrap(error, "reading", file) from error

    def locate(self, step: int) -> Path:
        return self.directory / name_of(step)

    def staged(self, step: int, *, replace: bool = False) -> StagedCheckpoint:
        return StagedCheckpoint(self.locate(step), replace=replace, lock=self._lock)

    def remove(self, step: int) -> None:
        if self._lock:
            self._lock.check()
        path = self.locate(step)
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}{STAGING_SUFFIX}")
        try:
            try:
                path.rename(aside)
            except FileNotFoundError:
                return
            sync_directory(self.directory)
        except OSError as error:
            raise TransferError.wrap(error, "removing", path) from error
        remove_entry(aside)

    def clean(self) -> None:
        for aside in self.directory.glob(f".step-*{REPLACED_SUFFIX}"):
            try:
                put_back(aside)
            except OSError as error:
                raise TransferError.wrap(error, "restoring", aside) from error
        staged = self.directory.glob(f".step-*{STAGING_SUFFIX}")
        left = (*staged, *self.directory.glob(f".probe.*{PART_SUFFIX}"))
        warn_of(remove_all({path: partial(remove_entry, path) for path in left}).values())
