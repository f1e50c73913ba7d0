"""Availability: whether a writer works somewhere, and if not why."""

from __future__ import annotations

import errno
from dataclasses import dataclass

__all__ = ["Availability", "remedy_of"]

_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether a writer works on a target; if not (or not quite) why, and what to do."""

    ok: bool
    reason: str = ""
    remedy: str = ""


def remedy_of(error: OSError) -> str:
    """What to do about a write that was tried in a directory and failed; empty if that is open."""
    return "Make room there, or name another directory." if error.errno in _FULL else ""
