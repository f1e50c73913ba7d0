"""kind_of_checkpointer: the class of a Checkpointer for a job and its options."""

from __future__ import annotations

from typing import Any

from iobench.checkpointer.checkpointer import Checkpointer
from iobench.errors import OptionError
from iobench.ranks.world import AnyWorld, World

__all__ = ["kind_of_checkpointer"]

_mixed: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def kind_of_checkpointer(cls: type[Any], world: AnyWorld, offload: Any) -> type[Any]:
    """Return the class for `cls`, which is iobench.Checkpointer or a subclass that a user made.

    For several ranks, and for an `offload`, that is another one. With a user's subclass it is one
    of both, in which the user's methods come first.
    """
    kind = _kind(world, offload)
    if issubclass(cls, kind):
        return cls
    if cls is Checkpointer:
        return kind
    if (cls, kind) not in _mixed:
        _mixed[cls, kind] = type(cls.__name__, (cls, kind), {"__module__": cls.__module__})
    return _mixed[cls, kind]


def _kind(world: AnyWorld, offload: Any) -> type[Any]:
    """Return the class without the user's; each is imported where it is needed: it takes time."""
    if World.of(world).size > 1:
        from iobench.checkpointer.ranked import RankedCheckpointer

        return RankedCheckpointer
    if offload is not None:
        found = getattr(offload, "checkpointer_kind", None)
        if found is None:
            raise OptionError(f"offload={offload!r:.80}: takes an optimizer of iobench.offload")
        kind: type[Any] = found()
        return kind
    return Checkpointer
