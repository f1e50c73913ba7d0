"""DirectoryTarget: checkpoints in a directory of a mounted file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from iobench import linux
from iobench.bench.processes.interrupts import deferred_interrupts
from iobench.bench.targets.base import OpenTarget
from iobench.checkpoint.store import StagedCheckpoint
from iobench.environment import DeviceMonitor, Machine, Storage, describe_machine, describe_storage
from iobench.environment.mounts import mount_id_of, mounts_in
from iobench.environment.storage import check_directory
from iobench.errors import TargetError, transfer_errors
from iobench.units import MIB
from iobench.writers.removal import remove_tree
from iobench.writers.s3_store.target import is_s3

_SPARE_FRACTION, _SPARE_BYTES = 0.05, 256 * MIB  # of the target's space left free


@dataclass(frozen=True, kw_only=True)
class DirectoryTarget:
    """A writable directory that exists."""

    path: Path
    no_ceiling = ""
    notes: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        return str(self.path.resolve())

    def check(self) -> None:
        check_directory(self.path)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise TargetError(f"--target {self.path}: cannot be written; choose another directory")

    def free_bytes(self) -> int | None:
        """Return the free bytes, less a margin."""
        space = os.statvfs(self.path)
        free = space.f_bavail * space.f_frsize
        return max(0, int(free * (1 - _SPARE_FRACTION)) - _SPARE_BYTES)

    def describe(self) -> tuple[Machine, Storage]:
        return describe_machine(), describe_storage(self.path)

    def monitor(self) -> DeviceMonitor:
        return DeviceMonitor(self.path)

    @contextmanager
    def scratch(self) -> Iterator[DirectoryScratch]:
        with scratch_directory(self.path) as directory:
            yield DirectoryScratch(directory=directory)


@dataclass(frozen=True, kw_only=True)
class DirectoryScratch:
    """The run's own directory."""

    directory: Path

    def locate(self, name: str) -> str:
        return str(self.directory / name)

    def staged(self, name: str) -> StagedCheckpoint:
        return StagedCheckpoint(self.directory / name)

    def remove(self, name: str) -> None:
        path = self.directory / name
        with _opened(path) as fd:
            if fd is not None:
                _detach_mounts(fd)  # what a writer mounted there
        if path.exists():
            remove_tree(path)


class LocalTargets:
    """The storage of a run on the machine of one rank.

    With `counts`, this rank is the one that counts and settles there; on rank 0's machine the run
    itself does that. `away` says that it is another machine than that of rank 0.
    """

    def __init__(self, scratch: Sequence[str], *, counts: bool, away: bool) -> None:
        self.counts, self.away = counts, away
        directories = [Path(one) for one in scratch if not is_s3(one)]
        self._targets = [
            OpenTarget.at(DirectoryScratch(directory=one), DeviceMonitor(one))
            for one in directories
        ]

    def under(self, location: str) -> OpenTarget | None:
        """Return the target of a checkpoint; None for one in a bucket."""
        parents = Path(location).parents
        return next((one for one in self._targets if one.scratch.directory in parents), None)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Run a block, and return when earlier work of this machine has left the storage alone."""
        with contextlib.ExitStack() as waits:
            if self.counts:
                for one in self._targets:
                    waits.enter_context(one.settled())
            yield


PREFIX = ".iobench-run-"
_LOCK = "lock"
_FUSE_RELEASES_WITHIN_S = 10.0


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """Make a new directory in `target` that exists until the block ends.

    It is removed at the end, on an error and on Ctrl-C, which cannot interrupt the removal.
    Directories that killed runs of this user left are removed first. A run holds a lock in its
    directory, and the kernel releases that lock when the run ends. Raises TargetError when `target`
    is not a writable directory.
    """
    check_directory(target)
    directory = target / f"{PREFIX}{secrets.token_hex(6)}"
    held = contextlib.ExitStack()
    try:
        try:
            with deferred_interrupts():
                lock = _make(directory)
                held.callback(os.close, lock)
            # The owner as the file system reports it: NFS may map root to another user.
            _remove_stale(target, os.fstat(lock).st_uid)
            yield directory
        finally:
            _remove(directory, held)
    finally:
        _remove(directory, held)  # again, for an interrupt just before the first call
        held.close()


def _make(directory: Path) -> int:
    """Make `directory` with a lock, and return the descriptor that holds the lock.

    The directory gets its name last. So another run never sees that name without a held lock while
    its run lives.
    """
    unnamed = directory.with_name(directory.name.replace(PREFIX, ".iobench-new-"))
    try:
        unnamed.mkdir()
        lock = os.open(unnamed / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unnamed.rename(directory)
        except OSError:
            os.close(lock)
            raise
    except OSError as error:
        shutil.rmtree(unnamed, ignore_errors=True)
        raise TargetError(
            f"--target {directory.parent}: cannot be written ({error.strerror})"
        ) from error
    return lock


def _remove(directory: Path, held: contextlib.ExitStack) -> None:
    """Remove `directory` if it exists, its lock last. `held` closes the lock.

    If the removal is cut off, the lock is still there, and the next run removes the rest.
    """
    with (
        transfer_errors("the next run removes what is left; removing", directory),
        deferred_interrupts(),
        _opened(directory) as fd,
    ):
        if fd is not None:
            _empty(fd)
            held.close()
            _remove_empty(directory)


@contextmanager
def _opened(directory: Path) -> Iterator[int | None]:
    """Yield a descriptor of `directory`; None if it is missing, a link, or not a directory.

    Other users may write to a target. A link under a run's name must not redirect a removal. So
    O_NOFOLLOW refuses a link, and everything below is reached from the descriptor.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _empty(fd: int) -> None:
    """Remove the content of the open directory `fd`, the lock last."""
    _detach_mounts(fd)
    with os.scandir(fd) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_directory in sorted(entries, key=lambda entry: entry[0] == _LOCK):
        if is_directory:
            shutil.rmtree(name, dir_fd=fd)  # follows no links
        else:
            os.unlink(name, dir_fd=fd)


def _detach_mounts(fd: int) -> None:
    """Unmount what a writer mounted in our directory `fd`.

    A removal would empty the mounted directory, and then fail at the mount point. A path may lead
    elsewhere by now, so the id decides whether it is that mount.
    """
    for mount in mounts_in(os.readlink(f"/proc/self/fd/{fd}")):
        point = os.open(mount.mount_point, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if mount_id_of(point) == mount.mount_id:
                linux.detach_mount(point)
        finally:
            os.close(point)


def _remove_empty(directory: Path) -> None:
    """Remove `directory`, after every name was unlinked and every file was closed.

    libfuse renames a file that is unlinked while it is open to `.fuse_hidden...`. A RELEASE request
    after the close removes that name, and the kernel does not wait for its answer.
    """
    until = time.monotonic() + _FUSE_RELEASES_WITHIN_S
    with contextlib.suppress(FileNotFoundError):  # another run saw it without a lock and removed it
        while (names := os.listdir(directory)) and time.monotonic() < until:
            if not all(name.startswith(".fuse_hidden") for name in names):
                break
            time.sleep(0.01)
        directory.rmdir()


def _remove_stale(target: Path, uid: int) -> None:
    """Remove the directories that killed runs of the user `uid` left, and no others."""
    for directory in target.glob(f"{PREFIX}*"):
        try:
            with _opened(directory) as fd:
                if fd is not None and os.fstat(fd).st_uid == uid:
                    _remove_unlocked(directory, fd)
        except BlockingIOError:
            continue  # its run is alive
        except FileNotFoundError:
            continue  # another run removed it
        except OSError as error:
            raise TargetError(
                f"{directory}: left by a killed run, cannot be removed ({error.strerror})"
            ) from error


def _remove_unlocked(directory: Path, fd: int) -> None:
    """Remove `directory` unless its run is alive; raise BlockingIOError if its lock is held."""
    try:
        lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except OSError:  # almost removed, by a run that is ending or was killed then
        with contextlib.suppress(OSError):
            directory.rmdir()
        return
    with contextlib.ExitStack() as held:
        held.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _empty(fd)
        held.close()
        _remove_empty(directory)
