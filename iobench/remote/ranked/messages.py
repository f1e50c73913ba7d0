"""What the ranks say to each other about the drain, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from iobench.errors import DataMismatchError, TransferError
from iobench.remote.pace import DrainStoppedError
from iobench.remote.queue import Queued
from iobench.remote.source_file import LocalDamageError

__all__ = ["NEXT", "NO_DEADLINE_S", "REPLY", "error_of", "shown_error", "shown_states", "states_of"]

NEXT, REPLY = "next copy", "copied"
"""Phases of the control plane."""

NO_DEADLINE_S = 1e9
"""A copy takes as long as it takes. A rank that is lost meanwhile is found by its silence."""

_KINDS = {
    "local": LocalDamageError,
    "stopped": DrainStoppedError,
    "mismatch": DataMismatchError,
    "failed": TransferError,
}


def shown_error(error: Exception) -> list[Any]:
    """Return an error as its kind, text and errno."""
    kind = next((name for name, one in _KINDS.items() if isinstance(error, one)), "failed")
    known = kind != "failed" or isinstance(error, TransferError)
    return [kind, str(error) if known else repr(error), getattr(error, "errno", None)]


def error_of(answers: Mapping[str, Sequence[Any]]) -> Exception | None:
    """Return the error of the ranks that failed; `answers` maps their names to their errors.

    Damage of local files counts first, then a drain that was stopped, damage of the copy, and all
    others.
    """
    for kind, make in _KINDS.items():
        found = {name: one for name, one in answers.items() if one[0] == kind}
        if found:
            error: Exception = make("; ".join(f"{name}: {one[1]}" for name, one in found.items()))
            if isinstance(error, TransferError):
                error.errno = next(iter(found.values()))[2]
            return error
    return None


def shown_states(entries: Sequence[Queued]) -> list[list[Any]]:
    """Return the states of copies."""
    return [[one.step, one.serial, one.state, one.durable_at_s, one.local] for one in entries]


def states_of(shown: Sequence[Sequence[Any]]) -> dict[int, Queued]:
    """Return the states of copies by step."""
    return {
        step: Queued(
            step=step,
            serial=serial,
            since_s=0.0,
            created_s=0.0,
            state=state,
            durable_at_s=durable_at_s,
            local=local,
        )
        for step, serial, state, durable_at_s, local in shown
    }
