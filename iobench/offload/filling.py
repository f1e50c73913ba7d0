"""StateFill: an update that replaces all of the state by one from another place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from iobench.offload.buffers import ChunkBuffer
from iobench.offload.layout import StateLayout
from iobench.offload.model import flat_view, place

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["StateFill", "StateSource"]


class StateSource(Protocol):
    """The fp32 tensors of all parameters, somewhere."""

    @property
    def counts(self) -> npt.NDArray[np.uint64]:
        """How often each parameter was updated."""

    def read(self, parameter: int, begin: int, into: Sequence[torch.Tensor]) -> None:
        """Fill `into`, one tensor of each kind, with the elements of `parameter` from `begin` on.

        Calls come in the order of the flat state, without gaps. Raises DataMismatchError.
        """


class StateFill:
    """Puts the state of `source` into each chunk, and its weights into the parameters. An Update.

    Call it with each chunk once, in order.
    """

    def __init__(
        self, layout: StateLayout, parameters: Sequence[torch.Tensor], source: StateSource
    ) -> None:
        self._layout, self._parameters, self._source = layout, parameters, source

    def __call__(self, buffer: ChunkBuffer) -> bool:
        tensors = buffer.tensors()
        with torch.no_grad():
            for piece in self._layout.pieces(buffer.chunk):
                into = [place(piece, tensor) for tensor in tensors]
                self._source.read(piece.parameter, piece.begin, into)
                model = flat_view(self._parameters[piece.parameter])[piece.begin : piece.end]
                model.copy_(into[0])  # the master weights
                buffer.parameter(piece).copy_(model)
        return True
