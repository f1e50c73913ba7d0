"""PerRank: a part of the state that differs between the ranks of a job, such as an RNG state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PerRank:
    """Marks a value of a state that each rank saves for itself.

        ckpt.save_async({"model": model.state_dict(), "rng": PerRank(torch.get_rng_state())}, step)

    Everything else in a state must be equal on all ranks, DTensors excepted. A load at the same
    world size returns this rank's value. At another world size it returns a `SavedPerRank`: only
    the caller knows how to distribute such values over more or fewer ranks.
    """

    value: Any


@dataclass(frozen=True)
class SavedPerRank:
    """The values of all ranks of the save, by rank: of a `PerRank` loaded at another world size."""

    values: tuple[Any, ...]
