"""of_one_rank: the state of a job of one rank, in which DTensors are whole."""

from __future__ import annotations

import sys
from typing import Any

from iobench.errors import StateError

__all__ = ["of_one_rank"]


def of_one_rank(state: Any) -> Any:
    """Return `state` with plain tensors for DTensors, which in a world of one are whole.

    Raises StateError for one that other ranks hold too.
    """
    if "torch.distributed.tensor" not in sys.modules:  # so no DTensor exists
        return state
    from iobench.checkpoint.ranked.local_tree import localized

    found: list[Any] = []
    whole = localized(state, found)
    for tensor in found:
        if tensor is not None and tensor.device_mesh.size() > 1:
            raise StateError(
                f"a DTensor of {list(tensor.shape)} is sharded over {tensor.device_mesh.size()} "
                "ranks, but the Checkpointer is alone: construct it in every rank, with world='job'"
            )
    return whole
