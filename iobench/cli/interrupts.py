"""Signals that interrupt a command, and a second chance for an interrupt that got lost."""

from __future__ import annotations

import signal
import warnings
from types import FrameType

_came = False


def once() -> list[int]:
    """Let SIGTERM and SIGHUP interrupt like Ctrl-C. Only the first of these signals counts.

    The signal starts the removal of temporary files, which later signals cannot interrupt. A signal
    that is ignored, for example by nohup, stays ignored. Returns the signals that interrupt.
    """
    asked: list[int] = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        global _came
        for other in asked:  # not SIG_IGN: Python may already have a pending signal to handle
            signal.signal(other, lambda *_: None)
        # A stream that was opened in the line that is interrupted warns when it is dropped.
        warnings.filterwarnings("ignore", message=".*nothing was published")
        _came = True
        raise KeyboardInterrupt

    for number in asked:
        signal.signal(number, interrupt)
    return asked


def check() -> None:
    """Raise KeyboardInterrupt if a signal came. Long work calls this between its steps.

    The exception of the signal handler may get lost: Python prints and drops what is raised inside
    a finalizer or a callback of the garbage collector, and a library may catch it.
    """
    if _came:
        raise KeyboardInterrupt


def ignore(numbers: list[int]) -> None:
    """Ignore these signals while Python exits: it resets its own handlers at exit."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # pending ones are handled here
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
