"""kind_of_checkpointer: the class of iobench.Checkpointer for a job and its options."""

from __future__ import annotations

from typing import Any

from iobench.dist.world import AnyWorld, World

__all__ = ["kind_of_checkpointer"]


def kind_of_checkpointer(world: AnyWorld, offload: Any) -> type | None:
    """Return the subclass for several ranks, or for an `offload`; None: Checkpointer itself.

    It takes time to import the others, so each is imported where it is needed.
    """
    if World.of(world).size > 1:
        from iobench.dist.ranked import RankedCheckpointer

        return RankedCheckpointer
    if offload is not None:
        from iobench.dist.offloaded import OffloadCheckpointer

        return OffloadCheckpointer
    return None
