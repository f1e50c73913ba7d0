"""safetensors files as file images: saves and restores copy no payload."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from iobench.errors import DataMismatchError, IobenchError, TransferError, UsageError
from iobench.formats.collector import collector_paused
from iobench.formats.file_memory import RUN_BYTES, FileMemory
from iobench.formats.inspected_file import InspectedFile
from iobench.formats.safetensors_header import DTYPES, METADATA, header_bytes
from iobench.formats.safetensors_layout import image_on_cpu
from iobench.formats.tensors import (
    Allocate,
    allocate_on,
    array_dtype,
    dtype_name,
    tensor_from_bytes,
    tensor_memory,
    tensors_in_rows,
    torch_dtype,
)
from iobench.text import parse_json
from iobench.units import KIB
from iobench.writers.base import Writer
from iobench.writers.image import AnyMemory, FileImage
from iobench.writers.transfer import Transfer

__all__ = ["image", "load", "prepare", "save"]

_CODES = {code: (name, item_bytes) for name, (code, item_bytes) in DTYPES.items()}
_INTEGERS = frozenset((int,))
_LONG_HEADER = 512 * KIB  # of about 5,000 tensors, which take 10 ms to make
_MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses more
_PACKED = "F4"


def image(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileImage:
    """Return the image of a safetensors file of `tensors` (CPU or CUDA).

    The file is identical to that of the safetensors library. The image shares the tensors' memory:
    they must not change during the write. Tensors that are not contiguous are copied here. Raises
    UsageError for names, dtypes and metadata that safetensors cannot hold.
    """
    try:
        on_cpu = image_on_cpu(path, tensors, metadata)
        if on_cpu is not None:
            return on_cpu
        described = [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
        header, places = header_bytes(described, metadata)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    return FileImage.of(path, [header, *(tensor_memory(tensors[name]) for name in places)])


def save(
    tensors: Mapping[str, torch.Tensor],
    path: str,
    target: str | Path,
    writer: Writer,
    *,
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
    sync_directory: bool = True,
) -> Transfer:
    """Write `tensors` to the safetensors file `target/path`; see `Writer.write` for durability."""
    return writer.write(
        image(path, tensors, metadata), target, durable=durable, sync_directory=sync_directory
    )


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


class _Entry(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """The description of one tensor in the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_parse = msgspec.json.Decoder(dict[str, _Entry]).decode
_parse_metadata = msgspec.json.Decoder(dict[str, str]).decode


def _entries(file: str, header: bytes) -> dict[str, _Entry]:
    """Return the descriptions of the tensors by name. Raises DataMismatchError."""
    # A typed parse makes and checks an entry in half the time of `json`, in a third of the memory.
    # What it refuses is parsed by `json`, which knows extra keys and says what is wrong.
    with suppress(ValueError, RecursionError):
        return _parse(_without_metadata(header))
    try:
        document = parse_json(header)
    except (ValueError, RecursionError) as error:
        raise DataMismatchError(f"{file}: not a safetensors file ({error})") from error
    if not isinstance(document, dict):
        raise DataMismatchError(f"{file}: not a safetensors file (the header is not an object)")
    metadata = document.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DataMismatchError(f"{file}: {METADATA} must map strings to strings")
    return {name: _entry(file, name, described) for name, described in document.items()}


_BEGIN = f'{{"{METADATA}":'.encode()


def _without_metadata(header: bytes) -> bytes:
    """Return the header without the metadata at its begin, where the library writes them.

    Raises ValueError unless they are strings, and for another form than that of the library.
    """
    if not header.startswith(_BEGIN):
        return header
    end = header.find(b"}", len(_BEGIN)) + 1
    _parse_metadata(header[len(_BEGIN) : end])  # refuses a brace inside of a string
    if header[end : end + 2] == b',"':
        return b"{" + header[end + 1 :]
    if header[end : end + 1] == b"}":
        return b"{" + header[end:]
    raise ValueError("another form than that of the library")


def _entry(file: str, name: str, described: Any) -> _Entry:
    """Return what `json` parsed. Raises DataMismatchError for a value of another type."""
    try:
        code, shape, (begin, end) = (described[key] for key in _Entry.__struct_fields__)
        # The type of a number too: JSON has 1.0, true and "1".
        sound = type(code) is str and type(shape) is list
        sound = sound and _INTEGERS.issuperset(map(type, (begin, end, *shape)))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise _undescribed(file, name)
    return _Entry(code, tuple(shape), (begin, end))


def _undescribed(file: str, name: str) -> DataMismatchError:
    return DataMismatchError(
        f"{file}: tensor {name!r} needs a dtype, shape and data_offsets of safetensors"
    )


def prepare(
    path: str,
    target: str | Path,
    writer: Writer | None = None,
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
        return _prepare(path, file, *_header(file, source), writer, allocate)


def _prepare(
    path: str,
    file: str,
    header: bytes,
    size: int,
    writer: Writer | None,
    allocate: Allocate | None,
) -> tuple[dict[str, torch.Tensor], FileImage]:
    memory = FileMemory(file, size, allocate)
    # Not for a read through the page cache, which needs the same free memory.
    many = writer is not None and writer.direct and len(header) >= _LONG_HEADER
    with memory.made_meanwhile() if many else nullcontext(), collector_paused():
        start = 8 + len(header)
        places = sorted(_places(file, _entries(file, header)))
        _check_gapless(file, places, size - start)
        tensors: dict[str, torch.Tensor] = {}
        for run in _runs(places, start, one_by_one=allocate is not None):
            begin, end, unit = run[0][0], run[-1][1], run[0][3].dtype.itemsize
            part = memory.take(start + begin, start + end, unit)
            tensors.update(_tensors(file, run, part))
        return tensors, memory.image(path)


def _tensors(file: str, run: list[_Place], part: AnyMemory) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the tensors of a run by name; their memory is `part`. Raises DataMismatchError."""
    kind = run[0][3]
    if isinstance(part, np.ndarray) and all(other is kind for _, _, _, other in run):
        rows = tensors_in_rows(part, kind.dtype, kind.shape, len(run))
        if rows is not None:
            return zip([name for _, _, name, _ in run], rows, strict=True)
    return _each_tensor(file, run, part)


def _each_tensor(
    file: str, run: list[_Place], part: AnyMemory
) -> Iterator[tuple[str, torch.Tensor]]:
    begin = run[0][0]
    for at, _, name, kind in run:
        if kind.values is not None and isinstance(part, np.ndarray):
            # As `tensor_from_bytes` makes it, in less time.
            yield name, torch.from_numpy(np.ndarray(kind.shape, kind.values, part, at - begin))
            continue
        try:
            yield name, tensor_from_bytes(part, kind.dtype, kind.shape, at - begin)
        except (TypeError, RuntimeError) as error:  # an empty tensor of shape [0, 2**63]
            raise DataMismatchError(
                f"{file}: tensor {name!r}: torch refuses the shape {list(kind.shape)}"
            ) from error


def load(
    path: str,
    target: str | Path,
    writer: Writer,
    *,
    device: str | torch.device = "cpu",
    allocate: Allocate | None = None,
) -> tuple[dict[str, torch.Tensor], Transfer]:
    """Restore the safetensors file `target/path`. Return its tensors by name, and the Transfer.

    On return all bytes have come from storage and are on `device` ("cpu", "cuda", "cuda:1").
    `allocate` replaces `device`; see `prepare`. Raises what `prepare` raises, and DataMismatchError
    for a file that was replaced after its header was read.
    """
    file, allocate = os.path.join(target, path), allocate or allocate_on(device)
    with InspectedFile.opened(file, writer) as source:
        tensors, image = _prepare(path, file, *_header(file, source), writer, allocate)
    moved = writer.read(image, target)
    source.check(file, image)
    return tensors, moved


class _Kind(NamedTuple):
    """What many tensors of a header have in common; `shape` is that of torch.

    `values` is numpy's dtype if an array of `shape` can have it and torch takes over both.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    size_bytes: int
    values: np.dtype[Any] | None

    @classmethod
    def of(cls, code: str, shape: tuple[int, ...]) -> _Kind:
        """Raises KeyError or ValueError for damage, UsageError if this torch lacks the dtype."""
        dtype, item_bytes = _CODES[code]
        odd = 0
        if code == _PACKED and shape:
            pairs, odd = divmod(shape[-1], 2)
            shape = (*shape[:-1], pairs)
        if odd or min(shape, default=0) < 0:
            raise ValueError(shape)
        made = torch_dtype(dtype)
        return cls(made, shape, prod(shape) * item_bytes, array_dtype(made, shape))


_Place = tuple[int, int, str, _Kind]
"""[begin, end) of a tensor in the data section, and its name. A tuple is the cheapest object."""


def _places(file: str, entries: dict[str, _Entry]) -> Iterator[_Place]:
    """Yield the tensors of the header. Raises DataMismatchError for one that breaks the format."""
    kinds: dict[tuple[Any, ...], _Kind] = {}
    for name, entry in entries.items():
        code, shape, (begin, end) = entry.dtype, entry.shape, entry.data_offsets
        kind = kinds.get((code, shape))
        if kind is None:
            try:
                kind = kinds[code, shape] = _Kind.of(code, shape)
            except UsageError:  # this torch lacks the dtype
                raise
            except (KeyError, ValueError) as error:
                raise _undescribed(file, name) from error
        if end - begin != kind.size_bytes:
            raise DataMismatchError(
                f"{file}: tensor {name!r} has {end - begin} bytes, which is not the size of {code} "
                f"{list(shape)}"
            )
        yield begin, end, name, kind


def _runs(places: list[_Place], data_start: int, *, one_by_one: bool) -> Iterator[list[_Place]]:
    """Yield consecutive tensors that get memory together, or each alone if one is unaligned."""
    ends = [end for _, end, _, _ in places]
    one_by_one = one_by_one or any((data_start + p[0]) % p[3].dtype.itemsize for p in places)
    first = 0
    while first < len(places):
        limit = places[first][0] + RUN_BYTES
        last = first + 1 if one_by_one else max(first + 1, bisect.bisect_right(ends, limit, first))
        yield places[first:last]
        first = last


def _check_gapless(file: str, places: list[_Place], data_bytes: int) -> None:
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
