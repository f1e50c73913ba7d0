"""Availability: whether a writer works on a target, and if not, why."""

from __future__ import annotations

import errno
from dataclasses import dataclass

__all__ = ["Availability", "remedy_of"]

_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether a writer works on a target; if not (or only in part), why, and what to do."""

    ok: bool
    reason: str = ""
    remedy: str = ""


def remedy_of(error: OSError) -> str:
    """Return what to do about a failed trial write in a directory; empty if unknown."""
    return "Make room there, or name another directory." if error.errno in _FULL else ""
