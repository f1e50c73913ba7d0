"""agreed: a step that all ranks do, and that fails in all of them if it fails in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from iobench.dist.control import Control
from iobench.errors import RankError

__all__ = ["agreed"]


def agreed(
    control: Control, phase: str, work: Callable[[], Any], *, deadline_s: float
) -> list[Any]:
    """Call `work` in every rank, and return the results of all ranks, which are JSON.

    If it raises, so does this in every rank: the rank's own error where it happened, a RankError
    that names the rank in the others. The ranks can go on after that.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as failure:  # noqa: BLE001 -- raised below, after the others know
        error = failure
    try:
        return control.all_gather(phase, result, deadline_s=deadline_s, error=error)
    except RankError as told:
        if error is not None:
            raise error from told
        raise
