"""safetensors files as file images: saves and restores copy no payload.

SafetensorsFile: an open file, of which tensors and slices are read one by one. runs_of: the tensors
of a file by its header, in runs that get memory together.
"""

from __future__ import annotations

import bisect
import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from iobench.errors import DataMismatchError, IobenchError, TransferError, UsageError
from iobench.formats.collector import collector_paused
from iobench.formats.file_memory import RUN_BYTES, FileMemory, Inspectable, InspectedFile
from iobench.formats.many_parts import WindowImage
from iobench.formats.safetensors_header import DTYPES, METADATA, header_bytes
from iobench.formats.tensor_layouts import FileLayout, located_dense
from iobench.formats.tensor_slices import CutImage, CutPart, room_for, rows_of, spans
from iobench.formats.tensors import (
    Allocate,
    allocate_on,
    array_dtype,
    dtype_name,
    tensor_from_bytes,
    tensor_memory,
    torch_dtype,
)
from iobench.text import parse_json
from iobench.writers.base import Writer
from iobench.writers.config import WriterLike, writer_of
from iobench.writers.image import AnyMemory, Bytes, FileImage, Ranges
from iobench.writers.transfer import Transfer

__all__ = ["image", "load", "prepare", "save"]

_MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses more
_CODES = {code: (name, item_bytes) for name, (code, item_bytes) in DTYPES.items()}
_PACKED = "F4"
_KEPT_RUNS = 16


@collector_paused()
def image(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileImage:
    """Return the image of a safetensors file of `tensors` (CPU or CUDA).

    The file is identical to that of the safetensors library. The image shares the tensors' memory:
    they must not change during the write. Tensors that are not contiguous are copied here. Raises
    UsageError for names, dtypes and metadata that safetensors cannot hold.
    """
    try:
        described = [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
        header, sizes = header_bytes(described, metadata)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    stored = [tensors[name] for name, size in sizes.items() if size]
    located = located_dense(stored)
    if located is None:
        return FileImage.of(path, [header, *map(tensor_memory, stored)])
    lengths = [size for size in sizes.values() if size]
    return FileLayout(header, lengths).image(path, located.addresses, {}, owners=located.owners)


def save(
    tensors: Mapping[str, torch.Tensor],
    path: str,
    target: str | Path,
    writer: WriterLike,
    *,
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
    sync_directory: bool = True,
) -> Transfer:
    """Write `tensors` to the safetensors file `target/path`; see `Writer.write` for durability."""
    made = image(path, tensors, metadata)
    return writer_of(writer).write(made, target, durable=durable, sync_directory=sync_directory)


def read_header(path: str, target: str | Path, writer: Inspectable) -> tuple[bytes, int]:
    """Return the JSON of the header of `target/path`, and the size of the file.

    Raises what `prepare` raises for the file; the JSON is not parsed.
    """
    file = os.path.join(target, path)
    with InspectedFile.opened(file, writer) as source:
        return _header(file, source)


def _header(file: str | Path, source: InspectedFile) -> tuple[bytes, int]:
    """Return the JSON of the header, and the size of the file."""
    try:
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        length = int.from_bytes(source.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise DataMismatchError(f"{file}: not a safetensors file (header length {length})")
        return source.read(length), size
    except IobenchError:
        raise
    except OSError as error:
        raise TransferError.wrap(error, "opening", file) from error


def prepare(
    path: str,
    target: str | Path,
    writer: Inspectable | None = None,
    *,
    allocate: Allocate | None = None,
) -> tuple[dict[str, torch.Tensor], FileImage]:
    """Return the tensors of the file `target/path`, still empty, and the image that fills them.

    The tensors share one piece of memory in the layout of the file, which direct reads fill without
    a copy. Yet each has its own storage; see `FileMemory`. With `allocate`, each tensor's memory
    comes from one call of it, in file order. The file is not mapped. `writer` opens the file to
    read its header; without a writer the file must be in a mounted file system. Raises
    DataMismatchError for a damaged file, and TransferError.
    """
    file = os.path.join(target, path)
    with InspectedFile.opened(file, writer) as source:
        return _prepare(path, file, *_header(file, source), allocate)


def _prepare(
    path: str,
    file: str,
    header: bytes,
    size: int,
    allocate: Allocate | None,
) -> tuple[dict[str, torch.Tensor], FileImage]:
    memory, start = FileMemory(file, size, allocate), 8 + len(header)
    with collector_paused():
        tensors: dict[str, torch.Tensor] = {}
        for run in runs_of(file, header, size - start, one_by_one=allocate is not None):
            part = memory.take(start + run.begin, start + run.end, run.unit)
            for begin, _, name, kind in run.entries:
                tensors[name] = _tensor(file, name, kind, part, begin - run.begin)
        return tensors, memory.image(path)


def _tensor(file: str, name: str, kind: Kind, part: AnyMemory, at: int) -> torch.Tensor:
    """Return the tensor at offset `at` of `part`. Raises DataMismatchError."""
    if kind.values is not None and isinstance(part, np.ndarray):
        # As `tensor_from_bytes` makes it, in less time.
        return torch.from_numpy(np.ndarray(kind.shape, kind.values, part, at))
    try:
        return tensor_from_bytes(part, kind.dtype, kind.shape, at)
    except (TypeError, RuntimeError) as error:  # an empty tensor of shape [0, 2**63]
        raise DataMismatchError(
            f"{file}: tensor {name!r}: torch refuses the shape {list(kind.shape)}"
        ) from error


def load(
    path: str,
    target: str | Path,
    writer: WriterLike,
    *,
    device: str | torch.device = "cpu",
    allocate: Allocate | None = None,
) -> tuple[dict[str, torch.Tensor], Transfer]:
    """Restore the safetensors file `target/path`. Return its tensors by name, and the Transfer.

    On return all bytes have come from storage and are on `device` ("cpu", "cuda", "cuda:1").
    `allocate` replaces `device`; see `prepare`. Raises what `prepare` raises, and DataMismatchError
    for a file that was replaced after its header was read.
    """
    writer, file = writer_of(writer), os.path.join(target, path)
    allocate = allocate or allocate_on(device)
    with InspectedFile.opened(file, writer) as source:
        tensors, image = _prepare(path, file, *_header(file, source), allocate)
    moved = writer.read(image, target)
    source.check(file, image)
    return tensors, moved


class TensorInFile(NamedTuple):
    """A tensor of a file: where it begins, what it is, and the tensors that it is read with."""

    start: int
    kind: Kind
    run: TensorRun

    def slice(self, index: Any = ()) -> torch.Tensor:
        """Return a slice as a view of a tensor without memory. Raises what torch raises."""
        whole = torch.empty(self.kind.shape, dtype=self.kind.dtype, device="meta")
        return whole[index]

    def room(self, view: torch.Tensor) -> torch.Tensor:
        """Return new memory for the slice `view` on the CPU; a read of rows needs no copy."""
        start = self.start + _offset(view) if view.is_contiguous() else 0
        return tensor_from_bytes(room_for(start, start + view.nbytes), view.dtype, view.shape)

    def cuts(self, view: torch.Tensor, values: torch.Tensor) -> list[CutPart]:
        """Return what to read for the slice `view` into its memory `values`."""
        found = spans(view)
        rows = rows_of(values, found)
        return [CutPart(self.start, span, row) for span, row in zip(found, rows, strict=True)]


class SafetensorsFile:
    """A safetensors file by its header, of which slices are read as they are asked for.

    A large tensor is read alone, by the ranges that a slice needs (see `spans`). Neighbours of up
    to 256 KiB together are read at once, and the last 16 of these runs are kept in memory for the
    next call. No file stays open; each read compares the file's identity, so that no byte comes
    from another file that got its name. Thread-safe. A forked child may use it.
    """

    def __init__(
        self,
        path: str,
        target: str | Path,
        writer: Writer,
        *,
        device: str | torch.device = "cpu",
        on_read: Callable[[Transfer], None] = lambda _: None,
    ) -> None:
        """Read the header of `target/path`. `on_read` gets the Transfer of each later read.

        Raises DataMismatchError for a damaged file, UsageError for a device or a dtype that this
        torch lacks, and TransferError.
        """
        self.path, self._target, self._writer = path, target, writer
        self._allocate, self.device = allocate_on(device), torch.device(device)
        self._on_read, self._pid = on_read, os.getpid()
        self.file = os.path.join(target, path)
        self._found = self._identity()
        self.header, self.size_bytes = read_header(path, target, writer)
        begin = 8 + len(self.header)
        runs = runs_of(self.file, self.header, self.size_bytes - begin, one_by_one=False)
        self.tensors = {
            name: TensorInFile(begin + at, kind, run)
            for run in runs
            for at, _, name, kind in run.entries
        }
        """The tensors by name, in the order of the file."""
        self._data_start = begin
        self._runs: OrderedDict[int, Bytes] = OrderedDict()

    def _identity(self) -> tuple[int, ...] | None:
        if "file" not in self._writer.schemes:
            return None
        found = os.stat(self.file)
        return found.st_dev, found.st_ino, found.st_size

    def check_unchanged(self) -> None:
        """Raise DataMismatchError if another file has this name now, or OSError if none has."""
        if self._identity() != self._found:
            raise DataMismatchError(f"{self.file}: was changed while it was open; open it again")

    def read(self, tensor: TensorInFile, view: torch.Tensor) -> torch.Tensor:
        """Return a slice of `tensor`, which `TensorInFile.slice` described, in new memory.

        It is contiguous, on the device. Raises DataMismatchError for a file that was changed, and
        TransferError.
        """
        alone = len(tensor.run.entries) == 1
        if alone and self._allocate is not None and view.is_contiguous() and view.numel():
            start = tensor.start + _offset(view)
            memory = self._allocate(view.nbytes)
            image = WindowImage(self.path, self.size_bytes, start, memory)
            self._read(image, [(start, start + view.nbytes)])
            return tensor_from_bytes(memory, view.dtype, view.shape)
        values = tensor.room(view)
        cuts = tensor.cuts(view, values)
        if cuts and alone:
            slices = CutImage(self.path, self.size_bytes, cuts)
            self._read(slices, slices.ranges)
        elif cuts:
            data, begin = self._run(tensor.run)
            for cut in cuts:
                cut.take(data, begin)
        return values.to(self.device)

    def _run(self, run: TensorRun) -> tuple[Bytes, int]:
        """Return the bytes of a run of small tensors, and where they begin in the file."""
        begin = self._data_start + run.begin
        data = self._runs.pop(begin, None)
        if data is None:
            data = room_for(begin, begin + run.end - run.begin)
            image = WindowImage(self.path, self.size_bytes, begin, data)
            self._read(image, [(begin, begin + len(data))])
        self._runs[begin] = data
        if len(self._runs) > _KEPT_RUNS:
            self._runs.popitem(last=False)
        return data, begin

    def _read(self, image: FileImage, ranges: Ranges) -> None:
        if os.getpid() != self._pid:  # a child must not use the rings and threads of its parent
            self._writer, self._pid = copy.copy(self._writer), os.getpid()
        moved = self._writer.read_ranges(image, self._target, ranges)
        self.check_unchanged()
        self._on_read(moved)


def _offset(view: torch.Tensor) -> int:
    """Return at which byte of its tensor a slice begins."""
    return int(view.storage_offset()) * view.itemsize


class Kind(NamedTuple):
    """What many tensors of a header have in common; `shape` is that of torch.

    `values` is numpy's dtype if an array of `shape` can have it and torch takes over both.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    item_bytes: int
    size_bytes: int
    values: np.dtype[Any] | None

    @classmethod
    def of(cls, code: str, shape: tuple[int, ...]) -> Kind:
        """Raises KeyError or ValueError for damage, UsageError if this torch lacks the dtype."""
        dtype, item_bytes = _CODES[code]
        odd = 0
        if code == _PACKED and shape:
            pairs, odd = divmod(shape[-1], 2)
            shape = (*shape[:-1], pairs)
        if odd or min(shape, default=0) < 0:
            raise ValueError(shape)
        made = torch_dtype(dtype)
        size_bytes = prod(shape) * item_bytes
        return cls(made, shape, made.itemsize, size_bytes, array_dtype(made, shape))


TensorEntry = tuple[int, int, str, Kind]
"""[begin, end) of a tensor in the data section, name and kind. A tuple is the cheapest object."""


class TensorRun(NamedTuple):
    """Consecutive tensors of a file: their bytes in the data section are [begin, end)."""

    begin: int
    end: int
    unit: int
    """Bytes of an element of the first one, the largest."""
    entries: list[TensorEntry]


def runs_of(file: str, header: bytes, data_bytes: int, *, one_by_one: bool) -> list[TensorRun]:
    """Return the tensors that the JSON `header` describes, in file order, in runs.

    With `one_by_one` each is a run, and also where one of them is unaligned. Raises
    DataMismatchError for a header that breaks the format, and UsageError for a dtype that this
    torch lacks. `file` is for messages.
    """
    places = tensors_of(file, header)
    _check_gapless(file, places, data_bytes)
    return list(_in_runs(places, 8 + len(header), one_by_one=one_by_one))


def tensors_of(file: str, header: bytes) -> list[TensorEntry]:
    """Return [begin, end) in the data section, name and kind of each tensor, in file order.

    Gaps and the file's size are not checked. Raises what `runs_of` raises.
    """
    return sorted(_places(file, header))


def metadata_of(header: bytes) -> dict[str, str] | None:
    """Return the metadata of a JSON `header` that `runs_of` admits; None without any."""
    metadata: dict[str, str] | None = parse_json(header).get(METADATA)
    return metadata


def _document(file: str, header: bytes) -> dict[str, Any]:
    """Return the header without the metadata. Raises DataMismatchError."""
    try:
        document = parse_json(header)
    except (ValueError, RecursionError) as error:
        raise DataMismatchError(f"{file}: not a safetensors file ({error})") from error
    if not isinstance(document, dict):
        raise DataMismatchError(f"{file}: not a safetensors file (the header is not an object)")
    metadata = document.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DataMismatchError(f"{file}: {METADATA} must map strings to strings")
    return document


def _places(file: str, header: bytes) -> Iterator[TensorEntry]:
    """Yield the tensors of the header. Raises DataMismatchError for one that breaks the format."""
    kinds: dict[tuple[str, ...], Kind] = {}
    for name, described in _document(file, header).items():
        try:
            code, sizes = described["dtype"], described["shape"]
            begin, end = described["data_offsets"]
            # The type of a number too: JSON has 1.0, true and "1".
            if type(sizes) is not list or {*map(type, (begin, end, *sizes))} != {int}:
                raise TypeError(sizes)
            kind = kinds.get((code, *sizes))
            if kind is None:
                kind = kinds[code, *sizes] = Kind.of(code, tuple(sizes))
        except UsageError:  # this torch lacks the dtype
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise DataMismatchError(
                f"{file}: tensor {name!r} needs a dtype, shape and data_offsets of safetensors"
            ) from error
        if end - begin != kind.size_bytes:
            raise DataMismatchError(
                f"{file}: tensor {name!r} has {end - begin} bytes, which is not the size of {code} "
                f"{sizes}"
            )
        yield begin, end, name, kind


def _in_runs(
    places: list[TensorEntry], data_start: int, *, one_by_one: bool
) -> Iterator[TensorRun]:
    """Yield consecutive tensors that get memory together, or each alone if one is unaligned."""
    ends = [end for _, end, _, _ in places]
    one_by_one = one_by_one or any(
        (data_start + begin) % kind.item_bytes for begin, _, _, kind in places
    )
    first = 0
    while first < len(places):
        limit = places[first][0] + RUN_BYTES
        last = first + 1 if one_by_one else max(first + 1, bisect.bisect_right(ends, limit, first))
        run = places[first:last]
        yield TensorRun(run[0][0], run[-1][1], run[0][3].item_bytes, run)
        first = last


def _check_gapless(file: str, places: list[TensorEntry], data_bytes: int) -> None:
    """Raise DataMismatchError unless the tensors fill the data section without gaps."""
    expected = 0
    for begin, end, name, _ in places:
        if begin != expected:
            raise DataMismatchError(
                f"{file}: tensor {name!r} begins at {begin}, expected {expected}"
            )
        expected = end
    if expected != data_bytes:
        raise DataMismatchError(
            f"{file}: has {data_bytes} bytes of data, its header describes {expected}"
        )
