"""Names of checkpoints: `step-20` for step 20."""

from __future__ import annotations

import re

__all__ = ["name_of", "step_of"]

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


def name_of(step: int) -> str:
    """Return the name of the checkpoint of `step`, such as `step-20`."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint; None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None
