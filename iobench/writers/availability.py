"""Availability: whether a writer works somewhere, and if not why."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Availability"]


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether a writer works on a target; if not (or not quite) why, and what to do."""

    ok: bool
    reason: str = ""
    remedy: str = ""
