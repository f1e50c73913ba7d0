"""CheckpointStore: the place of all checkpoints of a run, one entry per step.

StagedCheckpoint: a checkpoint directory that is visible only when it is complete and durable. The
files are written to a hidden directory and synced, the manifest last. Then every directory is
synced, the hidden one is renamed, and the parent is synced. Before the rename no reader sees a part
of it. To replace a checkpoint, the two directories exchange names and the old one is removed.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from iobench import linux
from iobench.checkpoint.manifest import MANIFEST, Manifest, name_of, step_of
from iobench.errors import TargetError, transfer_errors
from iobench.regular_file import read_regular
from iobench.writers.base import Writer
from iobench.writers.local.directory_lock import DirectoryLock, lock_directory
from iobench.writers.local.new_file import PART_SUFFIX, sync_directory
from iobench.writers.removal import remove_all, remove_entry, warn_of
from iobench.writers.s3_store.target import is_s3

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
