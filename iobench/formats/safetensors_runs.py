"""runs_of: the tensors of a safetensors file, in runs that get memory together, by its header."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from iobench.errors import DataMismatchError, UsageError
from iobench.formats.file_memory import RUN_BYTES
from iobench.formats.safetensors_header import DTYPES, METADATA
from iobench.formats.tensors import array_dtype, torch_dtype
from iobench.text import parse_json

_CODES = {code: (name, item_bytes) for name, (code, item_bytes) in DTYPES.items()}
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
