"""ChunkBuffer: one chunk while it is read, updated and written, with its header and checksums."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from iobench.errors import DataMismatchError
from iobench.formats.tensors import torch_dtype
from iobench.offload.layout import BLOCK, DataFile, ParameterPiece, StateLayout
from iobench.offload.record import NOWHERE, empty_rows
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ChunkBuffer", "check_slot_of", "digest_of", "slot_header"]

_SLOT = struct.Struct("<8sIIQQQ")
"""Magic, version, chunk, generation, updates, XXH3 of what follows the header."""
_SLOT_MAGIC, _SLOT_VERSION = b"iobslot\0", 1


class ChunkBuffer:
    """The slot of one chunk in both files, as they are on storage: the kernel moves this memory."""

    def __init__(self, layout: StateLayout) -> None:
        """Raises OSError (ENOMEM)."""
        self._layout = layout
        self._memory = fresh_pages(layout.buffer_bytes, huge=True)
        self.chunk = 0
        self.fresh = True
        self.row: np.void = empty_rows(layout)[0]

    def begin(self, chunk: int, row: np.void) -> None:
        """Use the buffer for `chunk`, whose bytes are where `row` says, if it has any yet."""
        self.chunk, self.row = chunk, row
        self.fresh = int(row["slot"]) == NOWHERE
        if self.fresh:
            self._memory[:] = 0

    @property
    def state(self) -> Bytes:
        """The slot in the file `state`: header and fp32 tensors."""
        return self._memory[: self._layout.state_bytes(self.chunk)]

    @property
    def header(self) -> Bytes:
        """The header of the slot."""
        return self._memory[:BLOCK]

    @property
    def payload(self) -> Bytes:
        """What follows the header, which its checksum covers."""
        return self.state[BLOCK:]

    @property
    def parameters(self) -> Bytes:
        """The slot in the file `parameters`."""
        start = self._layout.state_bytes(self.chunk)
        return self._memory[start : start + self._layout.parameter_bytes(self.chunk)]

    def tensors(self) -> list[torch.Tensor]:
        """The fp32 tensors of the chunk, in the order of the layout."""
        flat = torch.from_numpy(self.payload).view(torch.float32)
        return list(flat.split(self._layout.elements(self.chunk)))

    def slot(self, name: DataFile) -> Bytes:
        """The slot in this file."""
        return self.state if name == "state" else self.parameters

    def parameter(self, piece: ParameterPiece) -> torch.Tensor:
        """The values of `piece` in the slot of the file `parameters`, in their own dtype."""
        dtype = torch_dtype(self._layout.parameters[piece.parameter].dtype)
        size = (piece.end - piece.begin) * dtype.itemsize
        return torch.from_numpy(self.parameters[piece.bytes_at : piece.bytes_at + size]).view(dtype)


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
