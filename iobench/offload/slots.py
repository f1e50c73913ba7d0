"""Slots: the header of a chunk on storage, and its checksum."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from iobench.errors import DataMismatchError
from iobench.writers.image import Bytes

if TYPE_CHECKING:
    import numpy as np

__all__ = ["check_slot_of", "digest_of", "slot_header"]

_SLOT = struct.Struct("<8sIIQQQ")
"""Magic, version, chunk, generation, updates, XXH3 of what follows the header."""
_SLOT_MAGIC, _SLOT_VERSION = b"iobslot\0", 1


def slot_header(chunk: int, generation: int, updates: int, digest: int) -> bytes:
    """Return the beginning of a slot's header; the rest of its block is zeros."""
    return _SLOT.pack(_SLOT_MAGIC, _SLOT_VERSION, chunk, generation, updates, digest)


def check_slot_of(path: Path, header: bytes, row: np.void, chunk: int) -> None:
    """Raise DataMismatchError unless `header` is that of the chunk in `row`."""
    found = _SLOT.unpack_from(header)
    wanted = (_SLOT_MAGIC, _SLOT_VERSION, chunk, int(row["written"]))
    if found[:4] != wanted or found[5] != int(row["state"]):
        raise DataMismatchError(
            f"{path}: the slot of chunk {chunk} is not what generation "
            f"{int(row['written'])} wrote there"
        )


def digest_of(data: Bytes) -> int:
    """Return the XXH3 of `data`. Other threads run meanwhile."""
    state = xxhash.xxh3_64()  # the functions of one call hold the GIL before xxhash 4
    state.update(data.data)
    return state.intdigest()
