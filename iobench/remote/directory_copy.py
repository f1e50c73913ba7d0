"""DirectoryCopy: a checkpoint that is being copied to another directory."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from iobench.checkpoint.manifest import MANIFEST
from iobench.checkpoint.rate_limit import RateLimit
from iobench.checkpoint.staged import STAGING_SUFFIX, StagedCheckpoint
from iobench.errors import TargetError, transfer_errors
from iobench.remote.source_file import BLOCK_BYTES, SourceFile, foreign, open_own
from iobench.writers.file_writer import FileWriter
from iobench.writers.image import Bytes
from iobench.writers.local.directory_lock import DirectoryLock
from iobench.writers.local.new_file import make_directories

DRAINING_SUFFIX = ".iobench-draining"

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class DirectoryCopy(StagedCheckpoint):
    """A RemoteCopy in a hidden directory next to `final`, which `publish` renames.

    Its name has the step and the serial number, so the next attempt finds it.
    """

    def __init__(
        self,
        final: Path,
        writer: FileWriter,
        *,
        serial: int,
        limit: RateLimit,
        lock: DirectoryLock | None,
    ) -> None:
        super().__init__(final, replace=True, lock=lock)
        self.directory = final.with_name(f".{final.name}.{serial}{DRAINING_SUFFIX}")
        self._writer, self._limit = writer, limit

    def send(self, source: SourceFile) -> int:
        """Send one file; return the bytes sent, without those that were there already.

        The file is durable on return. Raises TransferError, StoppedError.
        """
        path = self.directory / source.name
        with transfer_errors("copying to", path), ExitStack() as stack:
            directory = self._open_parent(source.name)
            stack.callback(os.close, directory)
            fd = open_own(path, os.O_RDWR | os.O_CREAT, directory)
            stack.callback(os.close, fd)
            ranges = self._missing(fd, source)
            # A full disk is no reason to send it all again: a later attempt continues the file.
            with _lost_with_an_error(path.name, directory, spared=(errno.ENOSPC, errno.EDQUOT)):
                if ranges:
                    image = self._limit.limited(source.image())
                    self._writer.write_ranges(fd, image, ranges, str(path))
                os.ftruncate(fd, source.size_bytes)
            with _lost_with_an_error(path.name, directory):
                os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.fsync(directory)  # not by `publish` alone: another node may publish it
        return sum(stop - start for start, stop in ranges)

    def _missing(self, fd: int, source: SourceFile) -> list[tuple[int, int]]:
        """Return the ranges that the file does not have, of whole blocks."""
        have, found = os.fstat(fd).st_size, list[tuple[int, int]]()
        for start in range(0, source.size_bytes, BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, source.size_bytes)
            if stop <= have:
                self._limit.wait(0)
                if _same(fd, start, source.read(start, stop)):
                    continue
            if found and found[-1][1] == start:
                start, _ = found.pop()
            found.append((start, stop))
        return found

    def _open_parent(self, name: str) -> int:
        """Return a descriptor of the directory of the file `name`; make it if it is missing.

        Every step is relative to the one before and follows no link: in a directory that others may
        write to, the hidden name is known before, and a link there could lead anywhere.
        """
        make_directories(self.directory.parent)
        above, path = os.open(self.directory.parent, _DIRECTORY), self.directory.parent
        for part in (self.directory.name, *Path(name).parent.parts):
            path /= part
            try:
                below = _open_directory(path, above)
            finally:
                os.close(above)
            above = below
        return above

    def check(self, name: str, size_bytes: int) -> None:
        """Raise TargetError if another process sent this file to a place that is not this one."""
        path = self.directory / name
        found = path.lstat().st_size if path.exists() else None
        if found != size_bytes:
            raise TargetError(
                f"{path}: another rank has copied its {size_bytes} bytes, but this rank sees "
                f"{'no such file' if found is None else f'{found} bytes'}; the remote tier must be "
                "one directory that all nodes share"
            )

    def publish(self, manifest: bytes) -> None:  # type: ignore[override]  # of one part
        """Make it a checkpoint with this manifest, durable on return. Raises TransferError."""
        with transfer_errors("copying to", self.directory):
            directory = self._open_parent(MANIFEST)
            try:
                with contextlib.suppress(FileNotFoundError):  # of an attempt that was killed
                    os.unlink(MANIFEST, dir_fd=directory)
            finally:
                os.close(directory)
        super().publish([manifest])
        self._remove()  # the replaced checkpoint, which has this name now


@contextlib.contextmanager
def _lost_with_an_error(
    name: str, directory: int, *, spared: tuple[int, ...] = ()
) -> Iterator[None]:
    """Remove the file `name` after an OSError in the body, except those of the numbers `spared`.

    The kernel reports lost writes once, and may keep the bytes in the page cache: the next attempt
    would find them there, and its fsync would succeed.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in spared:
            os.unlink(name, dir_fd=directory)
        raise


def _open_directory(path: Path, above: int) -> int:
    """Return a descriptor of the directory `path`, in `above`; make it if it is missing."""
    made = False
    with contextlib.suppress(FileExistsError):
        os.mkdir(path.name, dir_fd=above)
        made = True
    if made:
        os.fsync(above)
    try:
        fd = os.open(path.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise foreign(path) from error
        raise
    owner = os.fstat(fd).st_uid
    if not made and owner != os.geteuid() and owner != _uid_of_new(above):
        os.close(fd)
        raise foreign(path)
    return fd


def _uid_of_new(above: int) -> int:
    """Return the owner of what this process makes: a server may map root to another user."""
    name = f".step-0.{secrets.token_hex(4)}{STAGING_SUFFIX}"  # `clean` removes it after a kill
    os.mkdir(name, dir_fd=above)
    try:
        return os.stat(name, dir_fd=above, follow_symlinks=False).st_uid
    finally:
        os.rmdir(name, dir_fd=above)


def _same(fd: int, start: int, block: Bytes) -> bool:
    """Return whether the file has the bytes of `block` at `start`."""
    found = os.pread(fd, len(block), start)
    return len(found) == len(block) and bool(
        np.array_equal(np.frombuffer(found, dtype=np.uint8), block)
    )
