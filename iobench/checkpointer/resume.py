"""resume_into: gives the objects of a trainer the state of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from iobench.checkpoint.load.like import is_sharded
from iobench.errors import StateMismatchError, UsageError

__all__ = ["Stateful", "expected_of", "resume_into"]


class Stateful(Protocol):
    """A module, an optimizer, a scheduler: what saves and restores its own state."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Go on from `state_dict`."""


def expected_of(objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the states of the modules, which a checkpoint is compared with.

    A new optimizer has no state yet, so its entry cannot be compared. Raises UsageError for what
    cannot be restored from full tensors.
    """
    if not isinstance(objects, Mapping):
        raise UsageError(
            f"resume: takes objects by the names that save() gave them, such as "
            f'{{"model": model}}, not a {type(objects).__name__}'
        )
    for name, one in objects.items():
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise UsageError(
                f"resume: {name!r} is a {type(one).__name__}, without load_state_dict; "
                "use load() for values"
            )
        groups = getattr(one, "param_groups", [])
        if any(is_sharded(p) for group in groups for p in group.get("params", ())):
            raise UsageError(
                f"resume: the parameters of {name!r} are sharded; call load(like=...) with a state "
                "of torch.distributed.checkpoint.state_dict.get_state_dict, and set_state_dict"
            )
    modules = {n: one for n, one in objects.items() if isinstance(one, torch.nn.Module)}
    return {name: module.state_dict() for name, module in modules.items()}


def resume_into(objects: Mapping[str, Stateful], state: Any, where: str) -> None:
    """Load the entries of `state` into the objects of the same names.

    Raises StateMismatchError for a name that the checkpoint lacks; then nothing has changed.
    """
    missing = [name for name in objects if not isinstance(state, dict) or name not in state]
    if missing:
        raise StateMismatchError(where, missing=missing)
    for name, one in objects.items():
        one.load_state_dict(state[name])
