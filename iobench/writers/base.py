"""Writer: moves a file image to storage and back by one I/O path.

Source: a stored file that is open for inspection, which a format does before a restore. CopyReader:
reads the files of a checkpoint from the nearest of its copies.
"""

from __future__ import annotations

import errno
import functools
import io
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, ClassVar, Protocol

import numpy as np

from iobench.errors import UnavailableError, UsageError, transfer_errors
from iobench.regular_file import open_regular
from iobench.writers.image import Bytes, FileImage, FileRanges, Ranges
from iobench.writers.options import WriterOptions
from iobench.writers.stream import BlockStream
from iobench.writers.transfer import Meter, Transfer


class Source(Protocol):
    """A binary file object that reads, seeks, and fetches many small ranges in one call."""

    def read(self, size: int = -1, /) -> bytes:
        """Return the next `size` bytes, or with -1 all to the end of the file."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to `offset` from the start (0), the position (1) or the end (2); return it."""

    def tell(self) -> int:
        """Return the position."""

    def close(self) -> None:
        """Release the file."""

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        """Return up to `size` bytes at each of `offsets`; fewer at the end of the file."""


class LocalSource(io.FileIO):
    """A regular file of a mounted file system. Raises the OSError of `open_regular`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(path), "rb", opener=lambda name, _: open_regular(name))

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        """Return up to `size` bytes at each of `offsets`; fewer at the end of the file."""
        return [os.pread(self.fileno(), size, offset) for offset in offsets]


class RangeSource(io.RawIOBase):
    """A Source of `size_bytes`; a subclass reads its ranges."""

    size_bytes: int

    def __init__(self) -> None:
        super().__init__()
        self._position = 0

    @abstractmethod
    def _fill(self, offset: int, room: Bytes) -> int:
        """Copy bytes from `offset` into `room`, up to the end of the file; return the count."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, f"a seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the position, up to the end of the file; return the count."""
        count = self._fill(self._position, np.frombuffer(buffer, dtype=np.uint8))
        self._position += count
        return count

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        """Return up to `size` bytes at each of `offsets`; fewer at the end of the file."""
        found = []
        for offset in offsets:
            room = np.empty(size, dtype=np.uint8)
            found.append(room[: self._fill(offset, room)].tobytes())
        return found


class ImageSource(RangeSource):
    """A file whose bytes are in memory, independent of the file that they were read from."""

    def __init__(self, image: FileImage) -> None:
        super().__init__()
        self._image, self.size_bytes = image, image.size_bytes

    def _fill(self, offset: int, room: Bytes) -> int:
        start = min(offset, self.size_bytes)
        return self._image.gather(start, min(start + len(room), self.size_bytes), room)


_MOVING = {
    "write": 1,
    "write_many": 1,
    "read": 1,
    "read_many": 1,
    "read_ranges": 1,
    "open": 0,
    "open_source": 0,
    "objects": 0,
}
"""The methods that take a target, each with the position of this argument."""


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether a writer works on a target; if not (or only in part), why, and what to do.

    It is true if the writer works: `if writer.available(target)`.
    """

    ok: bool
    reason: str = ""
    remedy: str = ""

    def __bool__(self) -> bool:
        return self.ok


class StoredObjects(Protocol):
    """The objects of a store at one key and below it: `run-10` is not below `run-1`.

    `Checkpointer`, DCP, Lightning and `iobench run` list and delete objects by it. A key is that of
    the bucket, without `s3://bucket/`. Every method raises TransferError or UnavailableError; then
    a part of its work may be done.
    """

    @property
    def endpoint(self) -> str:
        """The address of the store, without credentials, for records."""

    def keys(self) -> list[str]:
        """Return the keys of all objects, in any order."""

    def unfinished(self) -> list[str]:
        """Return the keys of uploads that are neither completed nor aborted."""

    def names(self, beginning: str) -> list[str]:
        """Return the names directly below the key that start with `beginning`.

        A name counts only if there are objects below it.
        """

    def delete(self, keys: list[str]) -> None:
        """Delete the objects with these keys. A missing object is not an error."""

    def remove(self, last: str = "") -> None:
        """Abort every upload and delete every object, that of the name `last` at the end."""


class Writer(ABC):
    """Moves file images by one I/O path. Made from options alone; thread-safe.

    A target is a directory (for `write`, `read`, `available`) or a file (for `open`). Writers of an
    object store take `s3://bucket/prefix` and `s3://bucket/key`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for `iobench writers`."""
    stores: ClassVar[bool] = True
    """False for a writer that stores nothing and only measures the harness."""
    schemes: ClassVar[tuple[str, ...]] = ("file",)
    """Accepted kinds of targets: `file` for directories, `s3` for `s3://bucket/prefix`."""
    Options: ClassVar[type[WriterOptions]]

    def __init_subclass__(cls, **how: Any) -> None:
        """Check the target's scheme in each method of the class that moves bytes.

        Without the check, a writer of files given `s3://bucket/run` creates `./s3:/bucket/run`. The
        check is here and not in the methods, so that no writer can forget it.
        """
        super().__init_subclass__(**how)
        for name in _MOVING.keys() & vars(cls).keys():
            setattr(cls, name, _with_scheme_checked(vars(cls)[name], _MOVING[name]))

    def __init__(self, options: WriterOptions | None = None, **values: Any) -> None:
        """Take `options`, or `values` for some of them: `ODirectWriter(block_size="8MiB")`."""
        if options is not None and values:
            raise UsageError("give options or values for them, not both")
        if options is not None and type(options) is not self.Options:
            raise UsageError(f"{type(options).__name__} are not options of writer {self.name!r}")
        self.options = options or self.Options.from_mapping(values)

    @property
    def direct(self) -> bool:
        """Whether large files go past the page cache; small parts of them are copied to blocks."""
        return False

    @abstractmethod
    def write(
        self,
        image: FileImage,
        target: str | Path,
        *,
        durable: bool = True,
        sync_directory: bool = True,
    ) -> Transfer:
        """Write `image` to `target/image.path`. Replaces an existing file whole or not at all.

        On return the file is complete under its name. Unless `durable=False`, its bytes are on
        storage. Its name is durable too, unless `sync_directory=False`: a caller that writes many
        files can then sync the directory once. A replaced file passes its owner and permissions
        to the new one, as far as this process may set them.

        On failure the name has what it had before. If only the sync of the directory failed, it has
        the whole new file, which a crash can still take back. Raises TransferError,
        UnavailableError when the I/O path is unavailable at the target, and TargetError when the
        name is that of a directory, pipe or device.
        """

    def write_many(
        self,
        images: Iterable[FileImage],
        target: str | Path,
        *,
        durable: bool = True,
        sync_directory: bool = True,
    ) -> Transfer:
        """Write many files. On return each file is in the state in which `write` leaves it.

        A writer may wait for storage once for many files: that wait is the largest cost of writing
        them one by one. It is not one transaction: on failure each name has the whole new file, or
        what it had before. Raises what `write` raises. The Transfer counts all files; its clock
        runs once over all of them. An image is taken when it is needed and released soon after:
        `images` may be a generator that makes them.
        """
        self.check_scheme(target)
        none = Meter().transfer(self.name, "write", 0, durable=durable, files=0)
        parts = (
            self.write(image, target, durable=durable, sync_directory=sync_directory)
            for image in images
        )
        return Transfer.total(itertools.chain([none], parts))

    @abstractmethod
    def read(
        self, image: FileImage, target: str | Path, *, start: int = 0, stop: int | None = None
    ) -> Transfer:
        """Fill bytes [start, stop) of the image's memory from `target/image.path`.

        Raises DataMismatchError when the sizes of file and image differ, TransferError,
        UnavailableError. On failure the memory's content is undefined.
        """

    def read_many(self, images: Iterable[FileImage | FileRanges], target: str | Path) -> Transfer:
        """Fill the memory of several images from their files, as `read` does with each.

        Of a pair (image, ranges), fill these ranges, as `read_ranges` does. A writer may keep
        blocks of several files in flight. On failure the memory's content is undefined. Raises what
        `read` raises. The Transfer counts all files. An image is taken when it is needed and
        released soon after: `images` may be a generator that makes them.
        """
        self.check_scheme(target)
        none = Meter().transfer(self.name, "read", 0, durable=True, files=0)
        parts = (
            self.read_ranges(one[0], target, one[1])
            if isinstance(one, tuple)
            else self.read(one, target)
            for one in images
        )
        return Transfer.total(itertools.chain([none], parts))

    def read_ranges(self, image: FileImage, target: str | Path, ranges: Ranges) -> Transfer:
        """Fill these ranges [start, stop) of the image's memory, which are in file order.

        They do not overlap, and no other bytes of the image need memory. Raises what `read` raises.
        A writer may keep blocks of several ranges in flight, like those of a whole file.
        """
        check_ranges(image, ranges)
        none = Meter().transfer(self.name, "read", 0, durable=True)
        parts = (self.read(image, target, start=start, stop=stop) for start, stop in ranges)
        return replace(Transfer.total(itertools.chain([none], parts)), files=1)

    @abstractmethod
    def open(self, target: str | Path, size: int | None = None) -> BlockStream:
        """Return a binary file object that writes the new file `target` by the same path.

        It is for serializers that stream. With a known `size` the writer reserves space. See
        `BlockStream` for when the file becomes visible and durable.
        """

    @abstractmethod
    def available(self, target: str | Path = ".") -> Availability:
        """Try whether this writer works in the directory `target`."""

    def open_source(self, target: str | Path) -> Source:
        """Open the stored file `target` to inspect it before a restore: its header, its size.

        Raises TransferError when the file does not exist.
        """
        self.check_scheme(target)
        with transfer_errors("opening", target):
            return LocalSource(target)

    def objects(self, target: str | Path) -> StoredObjects:
        """Return the stored objects at `target` and below it. Makes no request.

        A writer of an object store implements it. Raises UsageError for any other writer.
        """
        raise UsageError(
            f"{target}: writer {self.name!r} does not list and delete objects, which checkpoints "
            "in a bucket need; use --writer s3"
        )

    def close(self) -> None:  # noqa: B027 -- only some writers have connections
        """Close idle connections. The writer stays usable: the next operation opens new ones."""

    @classmethod
    def check_scheme(cls, target: str | Path) -> None:
        """Raise UsageError for a target of a kind that this writer does not accept."""
        if isinstance(target, PurePath) and target.parts[:1] == ("s3:",):
            raise UsageError(f"{target}: a Path drops a slash of s3://; give the target as a str")
        scheme, separator, _ = str(target).partition("://")
        scheme = scheme if separator else "file"
        if scheme in cls.schemes:
            return
        if scheme == "file":
            raise UsageError(f"{target}: writer {cls.name!r} needs a target s3://bucket/prefix")
        raise UsageError(
            f"{target}: writer {cls.name!r} writes files and needs a directory"
            + ("; use --writer s3 for buckets" if scheme == "s3" else "")
        )

    def require(self, target: str | Path) -> None:
        """Raise UnavailableError with reason and remedy unless `available(target)`."""
        self.check_scheme(target)
        answer = self.available(target)
        if not answer.ok:
            raise UnavailableError(self.name, answer.reason, answer.remedy)

    @staticmethod
    def _range_to_fill(image: FileImage, start: int, stop: int | None) -> tuple[int, int]:
        """Check the range of `read` and return it as (start, stop). Raises UsageError."""
        stop = image.size_bytes if stop is None else stop
        check_ranges(image, [(start, stop)])
        return start, stop

    def __reduce__(self) -> tuple[type[Writer], tuple[WriterOptions]]:
        """A pickle or copy holds the options alone, and the writer is made from them again."""
        return type(self), (self.options,)

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v!r}" for k, v in self.options.to_dict().items())
        return f"{type(self).__name__}({shown})"


def check_ranges(image: FileImage, ranges: Ranges) -> None:
    """Raise UsageError unless the memory of these ranges can be filled."""
    at = 0
    for start, stop in ranges:
        if not at <= start <= stop <= image.size_bytes:
            after = f", or begins before {at}" if at else ""
            raise UsageError(f"[{start}, {stop}) is not a range of {image.size_bytes} bytes{after}")
        at = stop
    if not image.writable:
        raise UsageError(f"image {image.path!r}: its memory is read-only")


def _with_scheme_checked(method: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Writer, *args: Any, **how: Any) -> Any:
        # A call without a target raises the TypeError of the method itself.
        if len(args) > position or "target" in how:
            self.check_scheme(args[position] if len(args) > position else how["target"])
        return method(self, *args, **how)

    return checked


class CopyReader(Protocol):
    """The files of one checkpoint. Copies form a chain: each has the next one or is the last.

    A copy reads from the next one what it lacks. What it has damaged is read from there when
    `read_again` asks for it. Thread-safe.
    """

    @property
    def name(self) -> str:
        """The name of the writer that reads it, for a Transfer."""

    @property
    def location(self) -> str | Path:
        """The directory or prefix of the files, for messages."""

    def read(self, image: FileImage, ranges: Ranges | None = None) -> Transfer:
        """Fill these ranges of the image of a file, or all of it; see Writer.read_ranges."""

    def read_again(self, image: FileImage, start: int, stop: int, piece: str) -> bool:
        """Fill the range of `piece`, which is damaged, from the next copy. False: none is left.

        Call it again if it is damaged there too.
        """

    def open_source(self, target: str) -> Source:
        """Open the file `target`, which is in `location`, to inspect it."""


class StoredReader:
    """What `writer` reads at `location`: the last copy of a chain."""

    def __init__(self, writer: Writer, location: str | Path) -> None:
        self._writer, self.location, self.name = writer, location, writer.name

    def read(self, image: FileImage, ranges: Ranges | None = None) -> Transfer:
        if ranges is None:
            return self._writer.read(image, self.location)
        return self._writer.read_ranges(image, self.location, ranges)

    def read_again(self, image: FileImage, start: int, stop: int, piece: str) -> bool:
        del image, start, stop, piece
        return False

    def open_source(self, target: str) -> Source:
        return self._writer.open_source(target)
