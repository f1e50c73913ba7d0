"""PosixWriter: the base of all writers of files."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from iobench.errors import transfer_errors
from iobench.writers.base import Writer, check_ranges
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.device.staging import staged
from iobench.writers.image import Bytes, FileImage, FileRanges, Ranges
from iobench.writers.local.direct_file import read_on, written_on
from iobench.writers.local.new_file import NewFile, open_source
from iobench.writers.local.new_file import sync_directory as sync_names
from iobench.writers.stream import BlockStream
from iobench.writers.transfer import Meter, Transfer

IOV_MAX = 1024  # limits.h: buffers in one pwritev or preadv

TOGETHER = 128
"""The files of one batch in write_many, which are synced together. Each has up to 2 descriptors."""
_SYNCS = 8  # concurrent fsyncs; measured in docs/decisions/0020


class OpenRead(NamedTuple):
    """Ranges of an image that are read from the open file `fd`. They are in order, none is empty.

    `path` is its name for messages.
    """

    fd: int
    path: str
    image: FileImage
    ranges: Ranges


class PosixWriter(Writer):
    """A writer of files. Subclasses implement how the bytes of an image move."""

    @abstractmethod
    def _send(self, file: NewFile, image: FileImage, meter: Meter) -> None:
        """Write the whole image; padding may make the file longer."""

    @abstractmethod
    def _receive(self, fd: int, image: FileImage, ranges: Ranges, meter: Meter) -> None:
        """Fill these ranges of the image, which are in order; none is empty."""

    def _receive_files(self, reads: Sequence[OpenRead], meter: Meter) -> None:
        """Fill the ranges of several images. Errors name the file."""
        for one in reads:
            with transfer_errors("reading", one.path):
                self._receive(one.fd, one.image, one.ranges, meter)

    @abstractmethod
    def _stream(self, file: NewFile, meter: Meter, size: int | None) -> BlockStream:
        """Return a stream that writes the new file."""

    @property
    def _reserves(self) -> bool:
        """Whether to reserve space before writing."""
        return bool(getattr(self.options, "fallocate", False))

    def _reserve(self, file: NewFile, size_bytes: int) -> None:
        if self._reserves:
            file.reserve(0, size_bytes)

    def write(
        self,
        image: FileImage,
        target: str | Path,
        *,
        durable: bool = True,
        sync_directory: bool = True,
    ) -> Transfer:
        meter = Meter()
        path = os.path.join(target, image.path)
        with transfer_errors("writing", path), NewFile(path, meter) as file:
            self._fill(file, image, meter)
            if durable:
                file.sync()
            file.publish(sync_names=durable and sync_directory)
        return meter.transfer(self.name, "write", image.size_bytes, durable=durable)

    def write_many(
        self,
        images: Iterable[FileImage],
        target: str | Path,
        *,
        durable: bool = True,
        sync_directory: bool = True,
    ) -> Transfer:
        meter = Meter()
        names: dict[str, None] = {}
        files = size = 0
        unpublished: list[NewFile] = []
        with contextlib.ExitStack() as undo:
            undo.callback(_abandon, unpublished)
            left = iter(images)
            while batch := list(itertools.islice(left, TOGETHER)):
                self._write_batch(batch, target, unpublished, meter)
                files, size = files + len(batch), size + sum(one.size_bytes for one in batch)
                if durable:
                    # The first sync makes most data and metadata of the others durable too. They
                    # share the rest: one commit of the journal, one flush of the device.
                    with meter.phase("sync"):
                        for one in map_in_workers(_SYNCS, _synced, unpublished):
                            meter.add(one, {})
                for file in unpublished:
                    names.update(dict.fromkeys(file.directories))
                    file.publish(sync_names=False)
                unpublished.clear()  # there may be 100,000
        if durable and sync_directory:
            with meter.phase("commit"):
                for directory in names:
                    with transfer_errors("publishing in", directory):
                        sync_names(directory)
        return meter.transfer(self.name, "write", size, durable=durable, files=files)

    def _write_batch(
        self,
        images: Sequence[FileImage],
        target: str | Path,
        unpublished: list[NewFile],
        meter: Meter,
    ) -> None:
        for image in images:
            path = os.path.join(target, image.path)
            with transfer_errors("writing", path):
                file = NewFile(path, meter)
                unpublished.append(file)
                self._fill(file, image, meter)

    def read(
        self, image: FileImage, target: str | Path, *, start: int = 0, stop: int | None = None
    ) -> Transfer:
        stop = image.size_bytes if stop is None else stop
        return self.read_ranges(image, target, [(start, stop)])

    def read_ranges(self, image: FileImage, target: str | Path, ranges: Ranges) -> Transfer:
        meter = Meter()
        with self._reachable(image, meter) as reachable:
            size = self._read_files([(reachable, ranges)], target, meter)
        return meter.transfer(self.name, "read", size, durable=True)

    def _read_files(self, files: Sequence[FileRanges], target: str | Path, meter: Meter) -> int:
        """Read ranges of files that are all open at once; return the bytes."""
        fds: list[int] = []
        reads: list[OpenRead] = []
        size = 0
        try:
            for image, ranges in files:
                check_ranges(image, ranges)
                path = os.path.join(target, image.path)
                with transfer_errors("reading", path), meter.phase("open"):
                    fd = open_source(path, image.size_bytes)
                    fds.append(fd)
                if wanted := [(start, stop) for start, stop in ranges if start < stop]:
                    size += sum([stop - start for start, stop in wanted])
                    reads.append(OpenRead(fd, path, image, wanted))
            if reads:
                self._receive_files(reads, meter)
        finally:
            for fd in fds:
                os.close(fd)
        return size

    def open(self, target: str | Path, size: int | None = None) -> BlockStream:
        meter = Meter()
        with transfer_errors("opening", target):
            file = NewFile(target, meter)
            try:
                if size:
                    self._reserve(file, size)
                return self._stream(file, meter, size)
            except BaseException:
                file.abandon()
                raise

    def _fill(self, file: NewFile, image: FileImage, meter: Meter) -> None:
        self._reserve(file, image.size_bytes)
        with self._reachable(image, meter) as reachable:
            self._send(file, reachable, meter)
        file.set_size(image.size_bytes)

    def _reachable(self, image: FileImage, meter: Meter) -> AbstractContextManager[FileImage]:
        """Provide `image` for `_send` and `_receive`: by default with all bytes on the host."""
        return staged(image, meter) if image.on_device else contextlib.nullcontext(image)


def _abandon(files: Iterable[NewFile]) -> None:
    with contextlib.ExitStack() as undo:  # goes on with the others after an interrupt
        for file in files:
            undo.push(file)


def pwrite_all(fd: int, views: list[Bytes], offset: int, flags: int = 0, *, unit: int = 1) -> int:
    """Write all of `views` at `offset`, continuing short writes; return the system calls made.

    A direct write is continued at a multiple of `unit`.
    """
    return _all(os.pwritev, written_on, fd, views, offset, flags, sys.maxsize, unit)


def pread_all(
    fd: int,
    views: list[Bytes],
    offset: int,
    flags: int = 0,
    *,
    wanted: int = sys.maxsize,
    unit: int = 1,
) -> int:
    """Fill all of `views` from `offset`, continuing short reads; return the system calls made.

    A direct read is continued at a multiple of `unit`. If only `wanted` bytes are in the file, the
    views may be longer, up to the next such multiple. Raises DataMismatchError when the file ends
    before.
    """
    return _all(os.preadv, read_on, fd, views, offset, flags, wanted, unit)


def _all(
    call: Callable[[int, Any, int, int], int],
    moved_on: Callable[[int, int, int, int, int], int],
    fd: int,
    views: list[Bytes],
    offset: int,
    flags: int,
    wanted: int,
    unit: int,
) -> int:
    done = calls = 0
    views = list(reversed(views))  # a copy, in an order in which pop() removes the first view
    while views and done < wanted:
        count = call(fd, views[: -IOV_MAX - 1 : -1], offset + done, flags)
        calls += 1
        before, done = done, moved_on(done, count, wanted, offset, unit)
        left = done - before
        while views and left >= len(views[-1]):  # empty ones too
            left -= len(views.pop())
        if left:
            views[-1] = views[-1][left:]
    return calls


def _synced(file: NewFile) -> Meter:
    meter = Meter()  # of its own: the caller's meter counts the time that the caller waits
    file.sync(meter)
    return meter
