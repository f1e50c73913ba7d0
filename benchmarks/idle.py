"""Wait until other programs do not work, before a time is taken."""

from __future__ import annotations

import sys
import time
from pathlib import Path

__all__ = ["wait_until_idle"]

_IDLE, _LOOK_S, _PATIENCE_S = 0.9, 0.1, 30.0


def wait_until_idle() -> None:
    """Return when the CPUs are idle, or when they have not been for a while."""
    until_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s:
        before = _idle_and_total()
        time.sleep(_LOOK_S)
        idle, total = (b - a for a, b in zip(before, _idle_and_total(), strict=True))
        if idle >= _IDLE * total:
            return
    sys.stderr.write("a round begins while other programs work\n")


def _idle_and_total() -> tuple[int, int]:
    """Return the ticks of /proc/stat in which the CPUs had nothing to do, and all of them."""
    ticks = [int(one) for one in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
