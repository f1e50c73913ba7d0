"""RemoteCopy: a checkpoint that is being copied, to another directory or to a bucket."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from iobench.checkpoint.manifest import MANIFEST, Manifest
from iobench.checkpoint.object_store import StagedObjects
from iobench.checkpoint.rate_limit import RateLimit
from iobench.checkpoint.store import STAGING_SUFFIX, StagedCheckpoint
from iobench.errors import TargetError, TransferError, transfer_errors
from iobench.regular_file import foreign, open_own
from iobench.remote.source_file import BLOCK_BYTES, SourceFile
from iobench.writers.file_writer import FileWriter
from iobench.writers.image import Bytes, WrappedImage
from iobench.writers.local.directory_lock import DirectoryLock
from iobench.writers.local.new_file import make_directories
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.parts import Checksum, etag_of, part_size_for
from iobench.writers.s3_store.target import S3Target
from iobench.writers.s3_store.upload import KEPT_PART
from iobench.writers.transfer import Meter

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
            with _lost_with_an_error(path.name, directory):
                if ranges:
                    image = self._limit.limited(source.image())
                    self._writer.write_ranges(fd, image, ranges, str(path))
                os.ftruncate(fd, source.size_bytes)
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
def _lost_with_an_error(name: str, directory: int) -> Iterator[None]:
    """Remove the file `name` after an OSError in the body.

    The kernel reports lost writes once, and may keep the bytes in the page cache: the next attempt
    would find them there, and its fsync would succeed.
    """
    try:
        yield
    except OSError:
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


class ObjectCopy:
    """A RemoteCopy under `prefix` of a bucket.

    The server itself says what it has: objects and the parts of unfinished uploads. They count only
    if their checksums are those of the source.
    """

    def __init__(self, prefix: str, writer: S3Writer, *, serial: int, limit: RateLimit) -> None:
        self._prefix, self._writer = S3Target.parse(prefix), writer
        self._staged = StagedObjects(prefix, writer, serial=serial)
        self._limit = limit

    def send(self, source: SourceFile) -> int:
        if self._has(self._prefix.below(source.name), source):
            return 0
        image = _MovedImage(source.image(), _limit=self._limit)
        kept = self._writer.resume(image, str(self._prefix)).paths.get(KEPT_PART)
        return source.size_bytes - (kept.bytes if kept else 0)

    def check(self, name: str, size_bytes: int) -> None:
        """Do nothing: a bucket is one place, and the store has answered with the checksum."""

    def publish(self, manifest: bytes) -> None:
        self._remove_others(Manifest.parse(manifest, str(self._staged.directory)))
        self._staged.publish([manifest])

    def _remove_others(self, manifest: Manifest) -> None:
        """Delete objects of other names: a direct save that failed may have left them."""
        wanted = {self._prefix.below(file.path).key for file in manifest.remote_files}
        objects = S3Objects(self._writer.client, self._prefix)
        found = objects.keys()
        if others := [key for key in found if key not in wanted]:
            objects.delete(others)

    def _has(self, place: S3Target, source: SourceFile) -> bool:
        """Return whether the store has the file already: by checksum, or else by ETag."""

        def head(s3: Any) -> Any:
            return s3.head_object(Bucket=place.bucket, Key=place.key, ChecksumMode="ENABLED")

        try:
            found = self._writer.client.call(head, Meter(), doing="looking for", where=place)
        except TransferError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        if found.get("ContentLength") != source.size_bytes:
            return False
        stored = Checksum.of_object(found)
        if stored is not None:
            checksum, text = stored
            value = 0
            for block in source.blocks():
                value = checksum.update(block, value)
            return checksum.text(value) == text
        return str(found.get("ETag")).strip('"') == self._etag(source)

    def _etag(self, source: SourceFile) -> str:
        """Return the ETag that most stores give to the file: an MD5, or that of its parts."""
        options, size = self._writer.options, source.size_bytes
        part_size = part_size_for(size, fixed_bytes=options.part_size, threads=options.threads)
        digests = [
            hashlib.md5(block.data, usedforsecurity=False).hexdigest()
            for block in source.blocks(part_size)
        ]
        if size <= part_size:
            return digests[0] if digests else hashlib.md5(usedforsecurity=False).hexdigest()
        return etag_of(digests)


class _MovedImage(WrappedImage):
    """The image `image`, of which each part waits for the limit before it is read and sent."""

    _limit: RateLimit

    @contextlib.contextmanager
    def outgoing(self, start: int, stop: int, meter: Meter) -> Iterator[list[Bytes]]:
        with self._limit.moving(stop - start), self._image.outgoing(start, stop, meter) as views:
            yield views


RemoteCopy = DirectoryCopy | ObjectCopy
"""A checkpoint on its way to the remote tier. It is visible there only after `publish`.

What an attempt has sent stays there when it ends early, also by kill -9. The next attempt compares
it with the source and sends only the rest.
"""
