"""together: a step that all ranks do, and that fails in all of them if it fails in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from iobench.errors import RankError
from iobench.ranks.calls import CallKind
from iobench.ranks.control import Control

__all__ = ["Together", "begin_together", "gathered", "scattered", "together"]

T = TypeVar("T")


class Together(Protocol):
    """`together` with a control plane and a deadline."""

    def __call__(
        self, phase: str, work: Callable[[], T], tell: Callable[[T], Any] | None = None
    ) -> tuple[T, list[Any]]: ...


def together(
    control: Control,
    phase: str,
    work: Callable[[], T],
    tell: Callable[[T], Any] | None = None,
    *,
    deadline_s: float,
) -> tuple[T, list[Any]]:
    """Call `work` in every rank. Return its own result, and what all ranks tell, in rank order.

    `tell` makes JSON of a result; without it the result is JSON itself.

    If either raises, so does this in every rank: the rank's own error where it happened, a
    RankError that names the rank in the others. The ranks can go on after that.
    """
    own, answer = _begin(control, "all-gather", phase, work, tell, deadline_s)
    return own, answer()


def begin_together(
    control: Control,
    phase: str,
    work: Callable[[], T],
    tell: Callable[[T], Any] | None = None,
    *,
    deadline_s: float,
) -> tuple[T, Callable[[], list[Any]]]:
    """Like `together`, with a function that waits for what all ranks tell. Call it once.

    An error of `work` is raised at once, after the other ranks were told. Rank 0 does not wait
    until the others have the values: a trainer waits for this.
    """
    return _begin(control, "all-gather", phase, work, tell, deadline_s, acknowledged=False)


def gathered(
    control: Control, phase: str, work: Callable[[], Any], *, deadline_s: float
) -> list[Any]:
    """Return the results of `together` in rank 0, and an empty list in the others."""
    return _begin(control, "gather", phase, work, None, deadline_s)[1]()


def scattered(
    control: Control,
    phase: str,
    work: Callable[[], T],
    tell: Callable[[T], list[Any] | None],
    *,
    deadline_s: float,
) -> tuple[T, Any]:
    """Like `together`, but rank 0 tells each rank a value of its own, in rank order.

    Return the own result and the value for this rank.
    """
    own, answer = _begin(control, "scatter", phase, work, tell, deadline_s)
    return own, answer()[0]


def _begin(
    control: Control,
    kind: CallKind,
    phase: str,
    work: Callable[[], T],
    tell: Callable[[T], Any] | None,
    deadline_s: float,
    *,
    acknowledged: bool = True,
) -> tuple[T, Callable[[], list[Any]]]:
    if control.world.size == 1:
        own = work()
        told = own if tell is None else tell(own)
        return own, lambda: list(cast(Any, told)) if kind == "scatter" else [told]
    own, value, failure = cast(T, None), None, None
    try:
        own = work()
        value = own if tell is None else tell(own)
    except Exception as error:  # noqa: BLE001 -- raised below, after the others know
        failure = error
    try:
        answer = control.begin(
            kind, phase, value, deadline_s=deadline_s, error=failure, acknowledged=acknowledged
        )
        if failure is not None:
            answer()  # it raises in all ranks
    except RankError as theirs:
        if failure is not None:
            raise failure from theirs
        raise
    return own, answer
