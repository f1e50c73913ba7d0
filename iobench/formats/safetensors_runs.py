"""runs_of: the tensors of a safetensors file, in runs that get memory together, by its header."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from iobench.errors import DataMismatchError, UsageError
from iobench.formats.file_memory import RUN_BYTES
from iobench.formats.safetensors_header import DTYPES, METADATA
from iobench.formats.tensors import array_dtype, torch_dtype
from iobench.text import parse_json

_CODES = {code: (name, item_bytes) for name, (code, item_bytes) in DTYPES.items()}
_INTEGERS = frozenset((int,))
_PACKED = "F4"


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
    return sorted(_places(file, _entries(file, header)))


def metadata_of(header: bytes) -> dict[str, str] | None:
    """Return the metadata of a JSON `header` that `runs_of` admits; None without any."""
    return msgspec.json.decode(header, type=_Metadata).metadata


class _Metadata(msgspec.Struct):
    metadata: dict[str, str] | None = msgspec.field(name=METADATA, default=None)


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


def _places(file: str, entries: dict[str, _Entry]) -> Iterator[TensorEntry]:
    """Yield the tensors of the header. Raises DataMismatchError for one that breaks the format."""
    kinds: dict[tuple[Any, ...], Kind] = {}
    for name, entry in entries.items():
        code, shape, (begin, end) = entry.dtype, entry.shape, entry.data_offsets
        kind = kinds.get((code, shape))
        if kind is None:
            try:
                kind = kinds[code, shape] = Kind.of(code, shape)
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
