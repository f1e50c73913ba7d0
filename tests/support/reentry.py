"""Enters code in the middle of a call: like a signal handler, a finalizer or another thread."""

import gc
import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_DEADLOCK_S = 10


def _entered(module: Any, call: Callable[[], object], entry: Callable[[], object], at: int) -> bool:
    """Make `call()`, and `entry()` before its bytecode number `at` in `module`; whether that came.

    In a thread of its own, so that a deadlock is a failure.
    """
    count, failures = 0, list[BaseException]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == at:
                entry()
        return trace

    def run() -> None:
        sys.settrace(trace)
        try:
            call()
        except BaseException as error:  # noqa: BLE001 -- raised below
            failures.append(error)
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_DEADLOCK_S)
    assert not thread.is_alive(), f"a deadlock, entered before bytecode {at}"
    if failures:
        raise failures[0]
    return count >= at


def everywhere(module: Any, check: Callable[[Callable[..., bool]], bool]) -> None:
    """Have `check` make its call with an entry at each bytecode, one after another."""
    at = 1
    while check(lambda call, entry, at=at: _entered(module, call, entry, at)):
        at += 1
    assert at > 5, "the module was never traced"


def at_every_collection(
    check: Callable[[], tuple[Callable[[], object], Callable[[], object]]],
) -> None:
    """Make the first call of `check`, and the second one in a garbage collection inside of it.

    In one collection after another. CPython 3.11 may collect whenever an object is made; finalizers
    then let other threads run, for which the second call stands.
    """
    usual, reached = gc.get_threshold(), 0
    for threshold, odd, at in itertools.product(range(1, 5), range(3), range(20)):
        call, meanwhile = check()
        numbers = itertools.count()

        def collecting(phase: str, _: dict[str, int]) -> None:
            nonlocal reached
            if phase == "start" and next(numbers) == at:  # noqa: B023 -- removed below
                reached += 1
                meanwhile()  # noqa: B023 -- the same

        pairs = [(number, number) for number in range(3000)]  # CPython keeps 2,000 to use again
        gc.callbacks.append(collecting)
        gc.set_threshold(threshold)
        try:
            _objects = [[] for _ in range(odd)]
            call()
        finally:
            gc.set_threshold(*usual)
            gc.callbacks.remove(collecting)
        pairs.clear()
    assert reached
