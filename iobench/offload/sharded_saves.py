"""ShardedSaves: FSDP2 ranks with offloaded state in the saves of a Checkpointer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from iobench.checkpoint.place import SaveParticipant
from iobench.checkpoint.rebuild import PerRank, SavedPerRank
from iobench.checkpoint.retention import Retention
from iobench.errors import OptionError, StateError, UsageError
from iobench.offload.groups import kept_values
from iobench.offload.layout import ADAM
from iobench.offload.state import OptimizerState
from iobench.offload.stock import load_state, state_dict_of
from iobench.offload.update import step_counter
from iobench.ranks.world import World

_KEY = "optimizer"


class ShardedSaves(SaveParticipant):
    """The SaveParticipant of ranks that each have the state of their own shards.

    The files of a checkpoint have the state as DTensors, under the key "optimizer", so any number
    of ranks can load it. Nothing is pinned.
    """

    def __init__(self, state: OptimizerState) -> None:
        self._state = state

    def check(
        self, *, keep: Retention | None, placed: bool, tiers: Sequence[Any], world: World
    ) -> None:
        """Raise OptionError unless the ranks of the Checkpointer are those of the DTensors."""
        del keep, placed, tiers
        ranks = self._state.ranks
        if (world.rank, world.size) != (ranks.rank, ranks.size) or world.size == 1:
            raise OptionError(
                f"offload: the DTensors are of {ranks.size} ranks, and the Checkpointer of "
                f"{world.size}; both need the same ranks, two or more. Otherwise save "
                "optimizer.state_dict() with the model's"
            )

    def added_to(self, state: Any) -> Any:
        """Return `state` with the optimizer's of this rank, read from storage into memory.

        Waits until the last step is durable. Raises StateError for another state than a dict
        without this key, UsageError before the first step, TransferError, DataMismatchError.
        """
        if not isinstance(state, dict) or _KEY in state:
            raise StateError(f"offload: a state must be a dict without the key {_KEY!r}")
        saved = state_dict_of(self._state, whole=True)
        record = self._state.running().store.base
        if record is None:
            raise UsageError("nothing to save before the first call of step()")
        for group, values in zip(
            saved["param_groups"], kept_values(self._state.groups), strict=True
        ):
            group.update(values)  # a learning rate may be a tensor
        # A rank that had no gradient has counted fewer steps than the others.
        counts = PerRank([int(count) for count in record.counts])
        return {**state, _KEY: {**saved, "updates": record.updates, "counts": counts}}

    def expected(self, like: Any) -> dict[str, Any]:
        """Return `like` with the tensors that `added_to` adds, without any bytes."""
        state = {}
        for number, parameter in enumerate(self._state.parameters()):
            one = torch.empty_like(parameter.detach(), dtype=torch.float32, device="meta")
            state[number] = {"step": step_counter(0), **dict.fromkeys(ADAM, one)}
        return {**(like or {}), _KEY: {"state": state}}

    def take(self, state: Any) -> Any:
        """Go on from the optimizer's part of `state`, in all ranks; return the rest.

        It is a new generation, durable on return, and its weights are in the parameters. Raises
        StateError when another number of ranks has counted different steps of one parameter.
        """
        saved = state.pop(_KEY)
        counts = saved["counts"]
        if isinstance(counts, SavedPerRank):
            if any(one != counts.values[0] for one in counts.values):
                raise StateError(
                    f"some of the {len(counts.values)} ranks that saved this had no gradient in "
                    "some steps: only as many ranks can go on from their moments"
                )
            counts = counts.values[0]
        for number, values in saved["state"].items():
            values["step"] = step_counter(counts[number])
        self._state.reopen()
        load_state(self._state, saved, saved["updates"])
        return state
