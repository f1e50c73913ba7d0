"""Planning: turns the state of this rank into what it writes, together with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner

from iobench.dist.agreed import agreed
from iobench.dist.control import Control
from iobench.dist.saves.content import RankContent
from iobench.dist.saves.plan import RankPlan, local_plan, made_plan
from iobench.dist.saves.structure import LocalState, RankStructure, local_state

__all__ = ["Planning"]


class Planning:
    """Makes the contents of saves.

    The ranks compare a hash of what each of them holds. They exchange plans when one of these
    hashes differs from that of the last save.
    """

    def __init__(
        self, control: Control, planner: Callable[[], SavePlanner], *, deadline_s: float
    ) -> None:
        self._control, self._planner, self._deadline_s = control, planner, deadline_s
        self._last: RankStructure | None = None
        self._plan: RankPlan | None = None
        self._keys: list[str] = []

    def local(self, state: Any) -> LocalState:
        """Return the state of this rank. Raises StateError with the path of what cannot be saved.

        No other rank is asked.
        """
        found = local_state(state, self._control.world.rank, self._last)
        self._last = found.structure
        return found

    def content(self, number: int, local: LocalState, told: list[Mapping[str, str]]) -> RankContent:
        """Return what this rank writes. `told` is what all ranks told about their states.

        Raises StateError, in all ranks, for states that do not fit together.
        """
        keys = [one["key"] for one in told]
        if self._plan is None or keys != self._keys:
            uniform = len({one["digest"] for one in told}) == 1
            self._plan = self._agreed(local, uniform)
            self._keys = keys
        return RankContent(
            number=number,
            rank=self._control.world.rank,
            structure=local.structure,
            plan=self._plan,
            skeleton=local.skeleton,
            alike=self._plan.uniform and len({one["plain"] for one in told}) == 1,
            tensors=local.tensors,
            located=local.located,
        )

    def _agreed(self, local: LocalState, uniform: bool) -> RankPlan:
        """Make a plan with the other ranks."""
        self._plan = None  # also if this fails
        planner = self._planner()
        every = agreed(
            self._control,
            "plan",
            lambda: local_plan(planner, local),
            deadline_s=self._deadline_s,
        )
        return made_plan(planner, local.structure, self._control.world.rank, every, uniform)
