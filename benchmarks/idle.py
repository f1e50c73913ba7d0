"""Keep other programs of the machine away from what is timed."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

__all__ = ["first_of_all", "wait_until_idle"]

_IDLE, _LOOK_S, _PATIENCE_S = 0.9, 0.1, 1.0


def wait_until_idle() -> None:
    """Return when the CPUs are idle, or after 1 s."""
    until_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s:
        before = _idle_and_total()
        time.sleep(_LOOK_S)
        idle, total = (b - a for a, b in zip(before, _idle_and_total(), strict=True))
        if idle >= _IDLE * total:
            return


def first_of_all() -> None:
    """Let this session have the CPUs before all others, where root asks for it (sched(7))."""
    with contextlib.suppress(OSError):  # not root, or no groups of sessions
        Path("/proc/self/autogroup").write_text("-20")


def _idle_and_total() -> tuple[int, int]:
    """Return the ticks of /proc/stat in which the CPUs had nothing to do, and all of them."""
    ticks = [int(one) for one in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
