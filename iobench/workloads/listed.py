"""ListedWorkload: a checkpoint whose files and tensors are listed, such as an imported one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from iobench.errors import UsageError, WorkloadFileError
from iobench.units import format_size, format_size_exact
from iobench.workloads.layouts.layout import file_of
from iobench.workloads.specs import FileFormat, FileSpec, TensorSpec, dtype_bytes
from iobench.workloads.workload import Scale, Workload

RESERVED = "manifest.json"
"""A run adds a file of this path to each checkpoint: no file of a workload has it."""

_LINE = re.compile(r"(\w+) (-|\d{1,15}(?:x\d{1,15}){0,31}) (.+)")
_MOST_BYTES = 2**50  # a file; the bound turns a typing error into a message
_SMALL = 2**20
_HEADERS = 2048  # bytes of a tensor's headers, at most, without its name


@dataclass(frozen=True, kw_only=True)
class ListedWorkload(Workload):
    """The files of a checkpoint, which one rank writes. Scaling drops tensors."""

    specs: tuple[FileSpec, ...]

    @classmethod
    def of(cls, specs: Iterable[FileSpec], **facts: Any) -> Self:
        """Return the workload of `specs`; `facts` are the other fields, without fingerprint."""
        listed = tuple(specs)
        return cls(specs=listed, fingerprint=_fingerprint(listed), **facts)

    def files(self, rank: int = 0) -> tuple[FileSpec, ...]:
        self.check_rank(rank)
        return self.specs

    @property
    def world_size(self) -> int:
        return 1

    def scaled(self, max_bytes: int, rank: int = 0) -> ListedWorkload:
        if self.size_bytes(rank) <= max_bytes:
            return self
        small = [one for one in self.specs if one.format == "raw" and one.size_bytes <= _SMALL]
        room = max_bytes - sum(one.size_bytes for one in small)
        kept: dict[str, list[int]] = {one.path: [0] for one in small}
        units = [
            (spec, number, _cost(spec, tensor))
            for spec in self.specs
            if spec.path not in kept
            for number, tensor in enumerate(spec.tensors)
        ]
        taken = 0
        for index in _spread(len(units)):
            spec, number, cost = units[index]
            if cost <= room:
                kept.setdefault(spec.path, []).append(number)
                room, taken = room - cost, taken + 1
        if not taken:
            smallest = max_bytes - room + min((cost for *_, cost in units), default=0)
            raise UsageError(
                f"workload {self.name!r} cannot be scaled to {format_size(max_bytes)}: the "
                f"smallest is {format_size_exact(smallest)} ({format_size(smallest)})"
            )
        specs = tuple(
            _reduced(one, sorted(kept[one.path])) for one in self.specs if one.path in kept
        )
        scale = Scale(
            layers=taken,
            full_layers=len(units),
            size_bytes=sum(spec.size_bytes for spec in specs),
            full_bytes=self.size_bytes(rank),
            limit_bytes=max_bytes,
            unit="tensors",
        )
        return replace(self, specs=specs, scale=scale)


def _spread(count: int) -> list[int]:
    """Return the numbers below `count` in an order whose first ones come from everywhere."""
    bits = count.bit_length()
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))


def _rest(spec: FileSpec) -> int:
    """Return the bytes of a DCP file that are not tensors."""
    return spec.size_bytes - spec.payload_bytes if spec.format == "dcp" else 0


def _cost(spec: FileSpec, tensor: TensorSpec) -> int:
    """Return the most bytes that a tensor adds to a smaller checkpoint."""
    if spec.format in ("raw", "dcp"):
        return tensor.size_bytes - -_rest(spec) // len(spec.tensors)
    return tensor.size_bytes + _HEADERS + 4 * len(tensor.name)


def _reduced(spec: FileSpec, numbers: Sequence[int]) -> FileSpec:
    if len(numbers) == len(spec.tensors):
        return spec
    tensors = tuple(spec.tensors[number] for number in numbers)
    rest = _rest(spec) * len(tensors) // len(spec.tensors)
    return file_of(spec.path, spec.format, tensors, rest + sum(t.size_bytes for t in tensors))


def _fingerprint(specs: Iterable[FileSpec]) -> str:
    """Return 16 hexadecimal digits of what is listed, without names and their order."""
    listed = sorted(
        [spec.format, _rest(spec), sorted((t.dtype, t.shape) for t in spec.tensors)]
        for spec in specs
    )
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


def line_of(tensor: TensorSpec) -> str:
    name = tensor.name
    if not name or not name.isprintable() or name != name.strip() or name[0] == '"':
        name = json.dumps(name)
    return f"{tensor.dtype} {'x'.join(map(str, tensor.shape)) or '-'} {name}"


def specs_of(entries: Iterable[object], path: Path) -> Iterator[FileSpec]:
    """Yield the files of `entries`. Raises WorkloadFileError; `path` is that of the file."""
    from iobench.workloads.schema import FileEntry, validate

    taken: set[str] = set()
    for number, content in enumerate(entries):
        entry = validate(FileEntry, content, path, ("files", str(number)))
        try:
            _check_path(entry.path, taken)
            tensors, size = _parsed(entry.tensors, entry.format), entry.size_bytes
            if (entry.format == "raw") == bool(tensors):
                raise ValueError("'tensors' has a line for each, and a raw file has none")
            if (entry.format in ("raw", "dcp")) != (size is not None):
                raise ValueError("'size_bytes' is that of a raw or dcp file; others have none")
            if size is not None and sum(one.size_bytes for one in tensors) > size:
                raise ValueError("'size_bytes' is less than the tensors have")
            yield file_of(entry.path, entry.format, tensors, size or 0)
        except ValueError as error:
            raise WorkloadFileError(
                f"{path}: field 'files.{number}', {entry.path!r}: {error}"
            ) from error


def _check_path(path: str, taken: set[str]) -> None:
    """Raise ValueError for a path that is not a new one below the checkpoint."""
    parts = path.split("/")
    above = {"/".join(parts[:count]) for count in range(1, len(parts))}
    if {"", ".", ".."} & {*parts} or path == RESERVED:
        raise ValueError(f"'path' must be below the checkpoint, and not {RESERVED}")
    if path in taken or f"{path}/" in taken or above & taken:
        raise ValueError("'path' is that of another file, or of a directory with files")
    taken |= {path, *(f"{one}/" for one in above)}


def _parsed(text: str, file_format: FileFormat) -> list[TensorSpec]:
    """Return the tensors of the lines of `text`. Raises ValueError."""
    tensors = []
    for line in filter(None, text.split("\n")):
        found = _LINE.fullmatch(line)
        if not found:
            raise ValueError(f"line {line:.60}: must be DTYPE SHAPE NAME, as in bfloat16 8x4 a.b")
        name = json.loads(found[3]) if found[3].startswith('"') else found[3]
        shape = () if found[2] == "-" else tuple(map(int, found[2].split("x")))
        try:
            dtype_bytes(found[1])
        except KeyError:
            raise ValueError(f"line {line:.60}: dtype {found[1]!r} is unknown") from None
        tensors.append(TensorSpec(name=name, dtype=found[1], shape=shape))
    names = {one.name for one in tensors}
    if len(names) < len(tensors):
        raise ValueError("two tensors have the same name")
    if sum(one.size_bytes for one in tensors) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES} bytes")
    if file_format == "torch":  # a name is the path through nested dicts
        parts = [name.split("/") for name in names]
        above = {"/".join(one[:count]) for one in parts for count in range(1, len(one))}
        numbers = {key for one in parts for key in one if key.isdigit()}
        if above & names or any(not one.isascii() or one != str(int(one)) for one in numbers):
            raise ValueError("the names are not the paths of nested dicts")
    return tensors
