"""VerifyInventory: the files and tensors of what is verified, by their indexes, and what is wrong.

Formats add to it before the bytes are read, and the read adds what it finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from iobench.errors import TransferError
from iobench.text import parse_json, printable
from iobench.verification.file_tree import FileTree, unreadable


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
