"""Raises an exception at each bytecode of some files, one at a time, in the threads of a test."""

import dis
import functools
import random
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Any

import pytest

_PART = 3
SOON_S = 10  # a wait that takes longer hangs

Place = tuple[CodeType, int]


class Boom(KeyboardInterrupt):
    """The exception that is raised at one bytecode."""


def within(seconds: float, call: Callable[[], object]) -> None:
    """Run `call()` in a new thread; fail with its stack if it does not return in time."""
    if (error := raised_within(seconds, call)) is not None:
        raise error


def raised_within(seconds: float, call: Callable[[], object]) -> BaseException | None:
    """Return the exception of `call()`, run like in `within`; None without one."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 -- returned
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        frame = sys._current_frames()[thread.ident or 0]
        pytest.fail("hangs:\n" + "".join(traceback.format_stack(frame)))
    return raised[0] if raised else None


@functools.cache
def _leaving_a_with(code: CodeType) -> frozenset[int]:
    """Offsets of the calls of `__exit__` at the end of a `with`, arguments included.

    CPython runs no signal handler there before the call, and the call is the RLock's own, in C.
    """
    found: set[int] = set()
    steps = [step for step in dis.get_instructions(code) if step.opname != "PRECALL"]
    for at in range(len(steps) - 3):
        *nones, call = steps[at : at + 4]
        if call.opname.startswith("CALL") and all(
            step.opname == "LOAD_CONST" and step.argval is None for step in nones
        ):
            first = at
            while steps[first - 1].opname == "SWAP":  # of a return; two since Python 3.14
                first -= 1
            found.update(range(steps[first].offset, call.offset + 2))
    return frozenset(found)


class Tracer:
    """Records the bytecodes of `files` that threads execute, or raises Boom at one of them."""

    def __init__(self, files: Collection[str | None], target: Place | None = None) -> None:
        self.passed: dict[Place, None] = {}
        self._files, self._target = files, target
        self.hit = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            place = frame.f_code, frame.f_lasti
            if place == self._target and not self.hit:
                self.hit = True
                raise Boom
            # Without a line: CPython's own end of a generator, where it runs no signal handler.
            if frame.f_lasti not in _leaving_a_with(frame.f_code) and frame.f_lineno is not None:
                self.passed[place] = None
        return self._opcode

    def run(self, call: Callable[[], object], *, in_threads: bool) -> BaseException | None:
        """Run `call()`; trace the threads that it starts, or itself. Return what it raises."""

        def traced() -> None:
            (threading if in_threads else sys).settrace(self)
            try:
                call()
            finally:
                sys.settrace(None)
                threading.settrace(None)

        return raised_within(SOON_S, traced)


def at_every_place(interrupted: Callable[[Place | None], Tracer], *, least: int = 100) -> None:
    """Call `interrupted` with places that it passes; most of the places must be met again.

    A run of the tests takes a random third of them: every bytecode is met over a few runs.
    """
    places: dict[Place, None] = {}
    for _ in range(3):
        places |= interrupted(None).passed
    assert len(places) > least
    hits = 0
    chosen = [*places][random.randrange(_PART) :: _PART]
    for place in chosen:
        try:
            hits += interrupted(place).hit
        except BaseException as error:
            code, offset = place
            lines = [line for start, stop, line in code.co_lines() if start <= offset < stop]
            where = f"interrupted in {code.co_name}, line {lines}, offset {offset}"
            # Not the error itself: a KeyboardInterrupt would end all tests.
            raise AssertionError(f"{where}: {error!r}") from error
    assert hits > 0.8 * len(chosen)
