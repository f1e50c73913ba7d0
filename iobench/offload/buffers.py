"""ChunkBuffer: the memory of one chunk while it is read, updated and written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from iobench.formats.tensors import torch_dtype
from iobench.offload.layout import BLOCK, ParameterPiece, StateLayout
from iobench.offload.record import NOWHERE, empty_rows
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ChunkBuffer", "parameter_view"]


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

    def parameter(self, piece: ParameterPiece) -> torch.Tensor:
        """The values of `piece` in the slot of the file `parameters`."""
        return parameter_view(self._layout, piece, self.parameters)


def parameter_view(layout: StateLayout, piece: ParameterPiece, memory: Bytes) -> torch.Tensor:
    """Return the values of `piece` in the parameter bytes of its chunk, in their own dtype."""
    dtype = torch_dtype(layout.parameters[piece.parameter].dtype)
    size = (piece.end - piece.begin) * dtype.itemsize
    return torch.from_numpy(memory[piece.bytes_at : piece.bytes_at + size]).view(dtype)
