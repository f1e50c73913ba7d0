"""The header of a safetensors file, byte for byte like the safetensors library (0.8).

A file is 8 bytes (length of the JSON, little endian), the JSON padded with spaces to a multiple of
8, and the tensors' bytes without gaps. The library sorts tensors by dtype, widest alignment first,
then by name. So every tensor is aligned to its own element size.
Format: https://huggingface.co/docs/safetensors; order: safetensors/src/tensor.rs, `prepare`.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from json.encoder import encode_basestring as _quoted
from math import prod
from operator import itemgetter

ALIGNMENT = 8
"""Alignment of the data section in bytes; the JSON is padded to it."""

DTYPES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "float4_e2m1fn_x2": ("F4", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "complex64": ("C64", 8),
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
}
"""Torch dtype name -> (code in the file, bytes per element), in the library's sort order."""

METADATA = "__metadata__"
"""Key of the header that is no tensor: strings by name."""

_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_RANK = {dtype: rank for rank, dtype in enumerate(DTYPES)}
_PACKED = {"float4_e2m1fn_x2": 2}  # torch counts pairs, the file counts values


def header_bytes(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, dict[str, int]]:
    """Return the complete header of a file of `tensors`, and each tensor's size in bytes.

    `tensors` are (name, torch dtype name such as "bfloat16", shape) in any order. The header is
    length, JSON and padding. The sizes are in file order: there are no gaps between the tensors.
    `metadata` becomes `__metadata__`. Empty metadata is left out, because the library writes
    broken JSON for it. Its keys are sorted; the library's order of several keys is random.

    Raises ValueError for a dtype that safetensors lacks, for a name that is not a str, is reserved
    or is given twice, and for metadata other than strings. Such a file could not be loaded.
    """
    ordered = sorted(tensors, key=file_order)
    entries, sizes = _entries(ordered)
    by_name = dict(zip(map(itemgetter(0), ordered), sizes, strict=True))
    if len(by_name) < len(ordered):
        name = Counter(map(itemgetter(0), ordered)).most_common(1)[0][0]
        raise ValueError(f"tensor name {name!r} is given twice")
    text = f"{{{','.join(_metadata_entries(metadata) + entries)}}}".encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, by_name


def file_size(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> int:
    """Return the bytes of a file of `tensors` in `file_order`, with the header of `header_bytes`.

    Their names differ.
    """
    entries, sizes = _entries(tensors)
    lengths = [len(entry.encode()) for entry in _metadata_entries(metadata) + entries]
    text = sum(lengths) + 2 + max(0, len(lengths) - 1)  # braces and commas
    return 8 + text + -text % ALIGNMENT + sum(sizes)


def file_order(tensor: tuple[str, str, tuple[int, ...]]) -> tuple[int, str]:
    """Return a key that sorts tensors like the file: the widest dtype first, then by name.

    Raises ValueError for a name or a dtype that safetensors cannot hold.
    """
    name, dtype, _ = tensor
    if not isinstance(name, str):
        raise ValueError(f"tensor name {name!r} is not a str; convert it")  # noqa: TRY004 -- as documented
    if name == METADATA:
        raise ValueError(f"tensor name {name!r} is reserved")
    if dtype not in _RANK:
        raise ValueError(
            f"tensor {name!r} has dtype {dtype!r}, which safetensors cannot hold; "
            f"it holds {', '.join(DTYPES)}"
        )
    return -_RANK[dtype], name


def _metadata_entries(metadata: Mapping[str, str] | None) -> list[str]:
    if not metadata:
        return []
    for pair in metadata.items():
        if not all(isinstance(text, str) for text in pair):
            raise ValueError(f"metadata {pair!r}: both must be str; convert them")
    return [f'"{METADATA}":{_json(dict(sorted(metadata.items())))}']


def _entries(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
) -> tuple[list[str], list[int]]:
    """Return the entry of the header and the size in bytes for each tensor, in the given order."""
    listed = list(tensors)
    kinds = list(map(itemgetter(1, 2), listed))
    made = {kind: _described(*kind) for kind in set(kinds)}  # few kinds of many tensors
    described = list(map(made.__getitem__, kinds))
    sizes = list(map(itemgetter(1), described))
    offsets = list(itertools.accumulate(sizes, initial=0))
    rows = zip(map(itemgetter(0), listed), described, offsets[:-1], offsets[1:], strict=True)
    return [
        f'{_quoted(name)}:{{{text},"data_offsets":[{begin},{end}]}}'
        for name, (text, _), begin, end in rows
    ], sizes


@lru_cache(maxsize=4096)  # a file has thousands of tensors of a dozen shapes
def _described(dtype: str, shape: tuple[int, ...]) -> tuple[str, int]:
    """Return dtype and shape as JSON, and the size in bytes."""
    (code, element_bytes), in_file = DTYPES[dtype], list(shape)
    if shape:
        in_file[-1] *= _PACKED.get(dtype, 1)
    return f'"dtype":"{code}","shape":{_json(in_file)}', prod(shape) * element_bytes
