"""VerifyInventory: the files and tensors of what is verified, by their indexes, and what is wrong.

FileTree: these files, in a directory or a bucket, and how they are read.

Formats add to it before the bytes are read, and the read adds what it finds.
"""

from __future__ import annotations

import errno
import io
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from iobench.errors import DataMismatchError, TargetError, TransferError, transfer_errors
from iobench.text import parse_json, printable
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


@dataclass(frozen=True, kw_only=True)
class VerifyFinding:
    """Something wrong at `path`, and with `tensor` if it is not empty.

    A warning is no damage: something that a reader will probably miss, such as a tokenizer.
    """

    path: str
    tensor: str = ""
    what: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        tensor = f": {self.tensor}" if self.tensor else ""
        return printable(f"{self.path}{tensor}: {self.what}")


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Result of `verify`. `kinds` are the formats that were recognised.

    `proved_bytes` of the `size_bytes` that were read have a checksum that was compared; `unproved`
    says by file why the others have none. `values` counts elements, if asked for: `nan`, `inf`, and
    `zero_tensors`, tensors of zeros alone.
    """

    findings: tuple[VerifyFinding, ...]
    kinds: tuple[str, ...]
    files: int
    tensors: int
    size_bytes: int
    proved_bytes: int
    elapsed_s: float
    unproved: Mapping[str, str]
    values: Mapping[str, int] | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged; warnings do not count."""
        return not self.errors

    @property
    def errors(self) -> tuple[VerifyFinding, ...]:
        """The findings that are damage."""
        return tuple(one for one in self.findings if one.severity == "error")


class CheckedRange(NamedTuple):
    """The bytes [start, stop) of a file, and what they are known to be.

    `name` is that of a tensor or a record. At most one of the others is set: `head` is the local
    header of a zip with this name.
    """

    start: int
    stop: int
    name: str
    xxh3_64: str = ""
    crc32: int | None = None
    head: bytes = b""


class TensorPart(NamedTuple):
    """The bytes [start, stop) of `file`, which hold a box of a tensor.

    `offsets` and `sizes` are the box in the tensor. `strides` are in elements; None if the box is
    contiguous in the file.
    """

    file: str
    start: int
    stop: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None = None


class ListedTensor(NamedTuple):
    """A tensor: torch's name of its dtype, its shape, and the parts that hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]


@dataclass(kw_only=True)
class ListedFile:
    """A file to read: ranges with checksums, in layers that do not overlap in themselves."""

    size_bytes: int
    layers: list[list[CheckedRange]] = field(default_factory=list)
    parts: list[tuple[ListedTensor, TensorPart]] = field(default_factory=list)
    """The parts of tensors in this file, in any order."""

    def in_order(self) -> Iterator[tuple[ListedTensor, TensorPart]]:
        """Yield the parts in the order of their bytes, without views of others' bytes."""
        end = 0
        for tensor, part in sorted(self.parts, key=lambda one: (one[1].start, -one[1].stop)):
            if part.start >= min(end, part.stop):
                end = max(end, part.stop)
                yield tensor, part

    @property
    def proved_bytes(self) -> int:
        """Bytes that have a checksum, in the layer that has the most."""
        proved = (
            sum(r.stop - r.start for r in layer if r.xxh3_64 or r.crc32 is not None)
            for layer in self.layers
        )
        return max(proved, default=0)


@dataclass(kw_only=True)
class VerifyInventory:
    """What formats found. Paths are relative to the `location` that is verified."""

    location: FileTree
    kinds: list[str] = field(default_factory=list)
    files: dict[str, ListedFile] = field(default_factory=dict)
    tensors: list[ListedTensor] = field(default_factory=list)
    findings: list[VerifyFinding] = field(default_factory=list)
    unproved: dict[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The bytes of each file; -1 for a link that leads nowhere."""
        return self.location.sizes

    def json(self, name: str) -> Any:
        """Return the JSON document `name`; None for damage, which is added."""
        try:
            return parse_json(self.location.read(name))
        except (ValueError, RecursionError) as error:
            zeros = self.location.read(name).count(0)
            self.error(name, "zeros instead of JSON" if zeros else f"not JSON ({error})")
        except TransferError as error:
            self.error(name, unreadable(error))
        return None

    def error(self, path: str, what: str, tensor: str = "") -> None:
        self.findings.append(VerifyFinding(path=path, tensor=tensor, what=what))

    def warn(self, path: str, what: str, tensor: str = "") -> None:
        found = VerifyFinding(path=path, tensor=tensor, what=what, severity="warning")
        self.findings.append(found)

    def found(self, kind: str) -> None:
        """Add a format to those that were recognised."""
        if kind not in self.kinds:
            self.kinds.append(kind)

    def file(self, path: str) -> ListedFile:
        """Return the file `path`, which will be read."""
        return self.files.setdefault(path, ListedFile(size_bytes=self.sizes[path]))

    def add(self, tensor: ListedTensor) -> None:
        self.tensors.append(tensor)
        for part in tensor.parts:
            self.file(part.file).parts.append((tensor, part))

    def below(self, folder: str) -> dict[str, int]:
        """Return the sizes of the files directly in `folder`, by name."""
        prefix = f"{folder}/" if folder else ""
        return {
            path[len(prefix) :]: size
            for path, size in self.sizes.items()
            if path.startswith(prefix) and "/" not in path[len(prefix) :]
        }
