"""Waits that Ctrl-C does not cut short: what is waited for still uses memory or a descriptor."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["uninterrupted"]


def uninterrupted(wait: Callable[[], None]) -> None:
    """`wait()` to its end. KeyboardInterrupt meanwhile has it called again, and is raised after."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            wait()
        except KeyboardInterrupt as error:
            interrupt = error
            continue
        break
    if interrupt is not None:
        raise interrupt
