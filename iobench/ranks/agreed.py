"""agreed: a step that all ranks do, and that fails in all of them if it fails in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from iobench.errors import RankError
from iobench.ranks.control import Control

__all__ = ["agreed", "begin_agreed", "gathered", "scattered"]


def agreed(
    control: Control, phase: str, work: Callable[[], Any], *, deadline_s: float
) -> list[Any]:
    """Call `work` in every rank, and return the results of all ranks, which are JSON.

    If it raises, so does this in every rank: the rank's own error where it happened, a RankError
    that names the rank in the others. The ranks can go on after that.
    """
    found: list[Any] = _begin(_at_once(control.all_gather), phase, work, deadline_s)()
    return found


def begin_agreed(
    control: Control, phase: str, work: Callable[[], Any], *, deadline_s: float
) -> Callable[[], list[Any]]:
    """Call `work`, and return a function that waits for the results of all ranks; see `agreed`.

    An error of `work` is raised at once, after the other ranks were told.
    """
    return _begin(control.begin_all_gather, phase, work, deadline_s)


def gathered(
    control: Control, phase: str, work: Callable[[], Any], *, deadline_s: float
) -> list[Any]:
    """Like `agreed`, with the results in rank 0 only; the others get an empty list."""
    found: list[Any] = _begin(_at_once(control.gather), phase, work, deadline_s)()
    return found


def scattered(
    control: Control, phase: str, work: Callable[[], list[Any] | None], *, deadline_s: float
) -> Any:
    """Call `work` in every rank; in rank 0 it returns a value for each rank, in rank order.

    Return the value for this rank. An error is raised in all ranks; see `agreed`.
    """
    return _begin(_at_once(control.scatter), phase, work, deadline_s)()


def _at_once(call: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    def begin(phase: str, value: Any, **options: Any) -> Callable[[], Any]:
        found = call(phase, value, **options)
        return lambda: found

    return begin


def _begin(
    begin: Callable[..., Callable[[], Any]],
    phase: str,
    work: Callable[[], Any],
    deadline_s: float,
) -> Callable[[], Any]:
    result, error = None, None
    try:
        result = work()
    except Exception as failure:  # noqa: BLE001 -- raised below, after the others know
        error = failure
    try:
        wait = begin(phase, result, deadline_s=deadline_s, error=error)
        if error is not None:
            wait()  # it raises in all ranks
    except RankError as told:
        if error is not None:
            raise error from told
        raise
    return wait
