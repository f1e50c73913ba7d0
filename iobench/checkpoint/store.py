"""CheckpointStore: the place of all checkpoints of a run, one entry per step."""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

from iobench.checkpoint.manifest import MANIFEST, Manifest, name_of, step_of
from iobench.checkpoint.staged import (
    REPLACED_SUFFIX,
    STAGING_SUFFIX,
    Staged,
    StagedCheckpoint,
    put_back,
)
from iobench.errors import TargetError, transfer_errors
from iobench.regular_file import read_regular
from iobench.writers.base import Writer
from iobench.writers.local.directory_lock import DirectoryLock, lock_directory
from iobench.writers.local.new_file import PART_SUFFIX, sync_directory
from iobench.writers.removal import remove_all, remove_entry, warn_of
from iobench.writers.s3_store.target import is_s3


class Checkpoints(Protocol):
    """The checkpoints of one run, to be listed and read."""

    readers: int
    """Threads that read manifests: more where a read is an answer of a server."""

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints (with a manifest) in ascending order."""

    def manifest(self, step: int, *, files: bool = True) -> Manifest:
        """Return the manifest of a checkpoint. Raises DataMismatchError when it is damaged.

        Without `files` it has none and is read faster.
        """

    def serials(self) -> dict[int, int]:
        """Return serial numbers by step, as far as the last call of `steps` saw them.

        They are those of the manifests, which need not be read then.
        """

    def locate(self, step: int) -> str | Path:
        """Return the directory or prefix of the checkpoint's files."""


class CheckpointStore(Checkpoints, Protocol):
    """The place of the checkpoints of one run."""

    def acquire(self) -> None:
        """Create the location and take its lock. Raises TargetError if another process has it."""

    def release(self) -> None:
        """Release the lock. A second call does nothing."""

    def staged(
        self, step: int, *, serial: int, replace: bool = False, shared: bool = False
    ) -> AbstractContextManager[Staged]:
        """Return a new checkpoint, whose manifest will have the number `serial`.

        An exit of the block without `publish` removes it. With `shared` other processes write to
        its directory too, which no earlier one can know.

        With `replace` it may replace a checkpoint of the same step, which stays until `publish` and
        is then removed. A RuntimeWarning says when it cannot be removed.
        """

    def remove(self, step: int) -> None:
        """Remove the checkpoint. It stops being a checkpoint before its files are removed.

        A checkpoint that another process removed already is not an error. Raises TransferError.
        Of a directory, a RuntimeWarning names files that cannot be removed; `clean` tries it again.
        """

    def clean(self) -> None:
        """Remove what killed processes left half written, half removed or replaced.

        A RuntimeWarning names what cannot be removed.
        """


def store_at(location: str | Path, writer: Writer) -> CheckpointStore:
    """Return the store of a directory or of `s3://bucket/prefix`.

    Raises UsageError when `writer` cannot write there.
    """
    writer.check_scheme(location)
    if is_s3(location):
        from iobench.checkpoint.object_store import ObjectStore

        return ObjectStore(str(location), writer)
    return DirectoryStore(Path(location))


class DirectoryStore:
    """Checkpoints in a directory. A half-written or half-removed one has a hidden name."""

    readers = 1

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()  # the process may change its working directory
        self.lock: DirectoryLock | None = None
        """The lock of the directory, between `acquire` and `release`."""

    def __str__(self) -> str:
        return str(self.directory)

    def acquire(self) -> None:
        self.lock = lock_directory(self.directory)

    def release(self) -> None:
        if self.lock:
            self.lock.release()
            self.lock = None

    def steps(self) -> list[int]:
        if not self.directory.is_dir():
            raise TargetError(f"{self.directory}: no such directory")
        with transfer_errors("listing", self.directory):
            found = ((step_of(path.name), path) for path in self.directory.iterdir())
            return sorted(
                step for step, path in found if step is not None and (path / MANIFEST).is_file()
            )

    def manifest(self, step: int, *, files: bool = True) -> Manifest:
        file = self.locate(step) / MANIFEST
        with transfer_errors("reading", file):
            return Manifest.parse(read_regular(file), str(file), files=files)

    def serials(self) -> dict[int, int]:
        return {}  # a listing does not have them, and a manifest is read quickly

    def locate(self, step: int) -> Path:
        return self.directory / name_of(step)

    def staged(
        self, step: int, *, serial: int, replace: bool = False, shared: bool = False
    ) -> AbstractContextManager[Staged]:
        del serial, shared  # the hidden name is random in any case
        return StagedCheckpoint(self.locate(step), replace=replace, lock=self.lock)

    def remove(self, step: int) -> None:
        if self.lock:
            self.lock.check()
        path = self.locate(step)
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}{STAGING_SUFFIX}")
        with transfer_errors("removing", path):
            try:
                path.rename(aside)
            except FileNotFoundError:  # another process removed it
                return
            sync_directory(self.directory)  # a power cut must not undo the rename
        warn_of(remove_all({aside: partial(remove_entry, aside)}).values())

    def clean(self) -> None:
        for aside in self.directory.glob(f".step-*{REPLACED_SUFFIX}"):
            with transfer_errors("restoring", aside):
                put_back(aside)
        staged = self.directory.glob(f".step-*{STAGING_SUFFIX}")
        left = (*staged, *self.directory.glob(f".probe.*{PART_SUFFIX}"))
        warn_of(remove_all({path: partial(remove_entry, path) for path in left}).values())
