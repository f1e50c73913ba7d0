"""together: what a rank keeps, and what it tells."""

from __future__ import annotations

from types import NoneType, SimpleNamespace
from typing import Any, cast

import pytest

from iobench.errors import RankError, StateError
from iobench.ranks.control import Control
from iobench.ranks.together import begin_together, together
from iobench.ranks.world import World


@pytest.fixture
def alone() -> Control:
    """A job of one rank."""
    return Control(World.single())


def test_a_rank_keeps_its_own_result(alone: Control) -> None:
    """It need not be JSON; the others get what `tell` makes of it."""
    own = object()
    assert together(alone, "a", lambda: own, lambda _: "told", deadline_s=1) == (own, ["told"])
    found, answer = begin_together(alone, "a", lambda: own, lambda _: 1, deadline_s=1)
    assert (found, answer()) == (own, [1])
    found = together(alone, "a", lambda: own, lambda _: [5], deadline_s=1, kind="scatter")
    assert found == (own, [5])
    assert together(alone, "a", lambda: 3, deadline_s=1) == (3, [3])


class _Two:
    """The Control of a job of two ranks, in which every call fails because of this one."""

    world = SimpleNamespace(size=2)

    def begin(self, kind: str, phase: str, value: Any, *, error: object, **_: Any) -> Any:
        del kind, value

        def answer() -> None:
            raise RankError(f"{phase}: {error}", ranks=[0])

        return answer


@pytest.mark.parametrize("where", ["work", "tell"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_is_that_of_the_rank(alone: Control, where: str, ranks: int) -> None:
    """The other ranks get a RankError, which is its cause here; without others it has no cause."""

    def fails(*_: Any) -> Any:
        raise StateError("no tensor")

    with pytest.raises(StateError, match="no tensor") as raised:
        together(
            alone if ranks == 1 else cast(Control, _Two()),
            "a",
            fails if where == "work" else lambda: 1,
            fails if where == "tell" else None,
            deadline_s=1,
        )
    assert isinstance(raised.value.__cause__, RankError if ranks > 1 else NoneType)
