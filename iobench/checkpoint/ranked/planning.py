"""Planning: turns the state of this rank into what it writes, together with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner

from iobench.checkpoint.ranked.content import RankContent
from iobench.checkpoint.ranked.plan import RankPlan, WholePlan, local_plan, made_plan, whole_plan
from iobench.checkpoint.ranked.structure import LocalState, RankStructure, local_state
from iobench.errors import StateError
from iobench.ranks.control import Control
from iobench.ranks.together import gathered, scattered

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

    def told(self, local: LocalState) -> dict[str, Any]:
        """Return what the other ranks must know about the state of this one."""
        return local.told()

    def content(self, number: int, local: LocalState, told: list[Mapping[str, str]]) -> RankContent:
        """Return what this rank writes. `told` is what all ranks told about their states.

        Raises StateError, in all ranks, for states that do not fit together.
        """
        keys = [one["key"] for one in told]
        if self._plan is None or keys != self._keys:
            uniform = len({one["digest"] for one in told}) == 1
            self._plan = self._agreed(local, keys, uniform)
            self._keys = keys
        alike = self._plan.uniform and len({one["plain"] for one in told}) == 1
        return self._content(number, local, self._plan, alike)

    def content_ahead(self, local: LocalState) -> RankContent | None:
        """Return what this rank writes if no rank has a new structure; None if this one has.

        It has no number yet, and no other rank is asked.
        """
        if self._plan is None or self._keys[self._control.world.rank] != local.structure.key:
            return None
        return self._content(-1, local, self._plan, self._plan.uniform)

    def _content(self, number: int, local: LocalState, plan: RankPlan, alike: bool) -> RankContent:
        world = self._control.world
        return RankContent(
            number=number,
            rank=world.rank,
            processes=world.local_size,
            structure=local.structure,
            plan=plan,
            skeleton=local.skeleton,
            alike=alike,
            tensors=local.tensors,
            located=local.located,
        )

    def _agreed(self, local: LocalState, keys: list[str], uniform: bool) -> RankPlan:
        """Make a plan with the other ranks: rank 0 makes it, and tells each rank its own part.

        Ranks with equal keys have equal local plans: the first of them sends it.
        """
        self._plan = None  # also if this fails
        planner, rank = self._planner(), self._control.world.rank
        first = [keys.index(key) for key in keys]
        sent = gathered(
            self._control,
            "plan",
            lambda: local_plan(planner, local) if first[rank] == rank else None,
            deadline_s=self._deadline_s,
        )

        def made() -> WholePlan | StateError | None:
            try:
                return None if rank else whole_plan(planner, sent, first)
            except StateError as error:  # every rank raises it as its own
                return error

        def parts(whole: WholePlan | StateError | None) -> list[dict[str, str]] | None:
            if isinstance(whole, StateError):
                return [{"error": str(whole)}] * len(keys)
            return None if whole is None else [{"boxes": text} for text in whole.texts()]

        whole, part = scattered(
            self._control, "parts of the plan", made, parts, deadline_s=self._deadline_s
        )
        if "error" in part or isinstance(whole, StateError):
            raise StateError(part["error"])
        return made_plan(local.structure, part["boxes"], whole, uniform)
