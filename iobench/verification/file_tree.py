"""FileTree: the files at a path, in a directory or a bucket, and how they are read."""

from __future__ import annotations

import errno
import io
import os
from collections import OrderedDict
from contextlib import closing
from pathlib import Path

from iobench.errors import DataMismatchError, TargetError, TransferError, transfer_errors
from iobench.writers.base import RangeSource, Source, Writer
from iobench.writers.image import Bytes
from iobench.writers.s3_store.target import S3Target, is_s3

_BLOCK = 256 * 1024
_BLOCKS = 16


class FileTree:
    """A file, a directory or a prefix of a bucket.

    `home` is the target of a writer, and `sizes` has the files below it. Of a single file, `home`
    is its directory. Hidden directories are left out: saves that are not complete have such names.
    Raises TargetError if there is nothing, TransferError.
    """

    def __init__(self, path: str | Path, writer: Writer) -> None:
        self.writer, self.single = writer, False
        writer.check_scheme(path)
        if is_s3(path):
            self.home, self.sizes = self._objects(str(path).rstrip("/"))
        else:
            self.home, self.sizes = self._walk(os.path.abspath(path))
        if not self.sizes:
            raise TargetError(f"{path}: there are no files here")

    def _walk(self, path: str) -> tuple[str, dict[str, int]]:
        if not os.path.exists(path):
            raise TargetError(f"{path}: does not exist")
        if not os.path.isdir(path):
            self.single = True
            return os.path.dirname(path), {os.path.basename(path): os.stat(path).st_size}
        found: dict[str, int] = {}
        seen: set[str] = set()
        for folder, below, names in os.walk(path, followlinks=True):  # a step may be a link
            real = os.path.realpath(folder)
            below[:] = sorted(one for one in below if not one.startswith(".") and real not in seen)
            for name in [] if real in seen else sorted(names):
                file = os.path.join(folder, name)
                if os.path.isfile(file):
                    found[os.path.relpath(file, path)] = os.stat(file).st_size
                elif os.path.islink(file):
                    found[os.path.relpath(file, path)] = -1  # it leads nowhere
            seen.add(real)
        return path, found

    def _objects(self, path: str) -> tuple[str, dict[str, int]]:
        key = S3Target.parse(path).key
        found: dict[str, int] = {}
        keys = sorted(self.writer.objects(path).keys())
        self.single = keys == [key]
        home = path[: path.rindex("/")] if self.single else path
        for one in keys:
            name = key.rsplit("/", 1)[-1] if self.single else one[len(key) :].lstrip("/")
            if not name.endswith("/"):
                with closing(self.writer.open_source(f"{home}/{name}")) as source:
                    found[name] = source.seek(0, io.SEEK_END)
        return home, found

    def path(self, name: str) -> str:
        return f"{self.home}/{name}"

    def source(self, name: str) -> Source:
        with transfer_errors("opening", self.path(name)):
            return self.writer.open_source(self.path(name))

    def read(self, name: str) -> bytes:
        """Return the bytes of a small file. Raises TransferError."""
        with closing(self.source(name)) as source, transfer_errors("reading", self.path(name)):
            return source.read()


def unreadable(error: DataMismatchError | TransferError) -> str:
    """Return the text of a finding. Raises `error` itself if it is no damage of a file."""
    if isinstance(error, DataMismatchError):
        return str(error)
    if error.errno in (errno.EIO, errno.ENOENT):  # a bad block; removed meanwhile
        return f"cannot be read ({error.strerror})"
    raise error


class CachedSource:
    """The bytes of a Source, with the blocks that were read last: indexes of neighbours share one.

    A DCP file may have 10,000 items, each with an index of its own.
    """

    def __init__(self, source: Source, size_bytes: int) -> None:
        self._source, self.size_bytes = source, size_bytes
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), fewer at the end of the file."""
        stop = min(stop, self.size_bytes)
        numbers = range(start // _BLOCK, -(-stop // _BLOCK))
        data = b"".join(map(self._block, numbers))
        begin = numbers.start * _BLOCK
        return data[start - begin : max(start, stop) - begin]

    def _block(self, number: int) -> bytes:
        found = self._blocks.pop(number, None)
        if found is None:
            self._source.seek(number * _BLOCK)
            found = self._source.read(min(_BLOCK, self.size_bytes - number * _BLOCK))
        self._blocks[number] = found
        if len(self._blocks) > _BLOCKS:
            self._blocks.popitem(last=False)
        return found


class Slice(RangeSource):
    """The bytes [start, stop) of a file as a Source."""

    def __init__(self, source: CachedSource, start: int, stop: int) -> None:
        super().__init__()
        self._file, self._start, self.size_bytes = source, start, stop - start

    def _fill(self, offset: int, room: Bytes) -> int:
        stop = min(offset + len(room), self.size_bytes)
        data = self._file.read(self._start + offset, self._start + max(offset, stop))
        room[: len(data)] = memoryview(data)
        return len(data)
