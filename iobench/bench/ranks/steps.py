"""One command in one rank: the calls that all ranks make for it, in the same order.

Commands and replies are plain JSON values: no pickle is sent or loaded.

next command      broadcast: the command and its arguments, or the end
NAME begins       barrier: all ranks have it; each phase has a name for messages
NAME              broadcast, for an operation that is timed: the moment of the release
NAME done         gather: the replies
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar, get_type_hints

from iobench.bench.counters.monitor import Usage
from iobench.bench.processes.job import CheckpointRef, Done, Job, Release
from iobench.bench.ranks.members import OPERATION_S
from iobench.errors import JobError, RankError
from iobench.ranks.control import ClockOffset, Control
from iobench.results.codec import from_plain, to_plain
from iobench.text import one_line
from iobench.writers.transfer import TICK_S

T = TypeVar("T")


def message_of(what: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the message for `partial(Job.method, name=value)`.

    Raises ValueError for anything else: only methods of a job, with named arguments, have a
    message.
    """
    method, given = (what.func, what.keywords) if isinstance(what, partial) else (what, {})
    name = getattr(method, "__name__", "")
    if method != getattr(Job, name, None) or (isinstance(what, partial) and what.args):
        raise ValueError(f"{what!r} is not a method of Job with named arguments")
    return {"do": name, "with": to_plain(given)}


def command_of(message: Any) -> Callable[[Job], Any]:
    """Return the command in `message`. Raises ValueError if it is not one of `message_of`."""
    name, given = message["do"], message["with"]
    types = _types(name)
    if not set(given) <= set(types):
        raise ValueError(f"{name} has no argument {', '.join(sorted(set(given) - set(types)))}")
    values = {key: from_plain(types[key], value) for key, value in given.items()}
    return lambda job: getattr(job, name)(**values)


def reply_of(what: Callable[[Any], T], plain: Any, who: str) -> T:
    """Return the reply to `what` from its plain values. Raises JobError if they are not valid."""
    method = getattr(what, "func", what)
    try:
        reply: T = from_plain(_types(method.__name__)["return"], plain)
    except ValueError as error:
        raise JobError(f"{who}: its reply to {method.__name__} is not valid ({error})") from None
    return reply


@cache
def _types(name: str) -> dict[str, Any]:
    method = getattr(Job, name, None)
    if name.startswith("_") or not callable(method):
        raise ValueError(f"{name!r} is not a command")
    return get_type_hints(method)


_MEASURE_EVERY_S = 30.0  # clocks drift apart by up to 50 microseconds in a second
_SPIN_S = 0.0005  # a sleep ends later than it should


def wait_until(
    at_s: float,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> float:
    """Return at `at_s` of time.perf_counter; the result is the seconds by which that is too late.

    The last half millisecond is spent in a loop: a sleep ends when the scheduler finds the time.
    """
    while (left_s := at_s - clock()) > _SPIN_S:
        sleep(left_s - _SPIN_S)
    while (now_s := clock()) < at_s:
        pass
    return max(0.0, now_s - at_s)


@dataclass(kw_only=True)
class Lead:
    """How long before the release its time is sent; longer after a rank got it too late."""

    seconds: float = 0.02
    longest_s: float = 5.0
    tolerated_s: float = 0.002

    def began(self, late_s: float) -> None:
        """Adapt to the lateness of the last rank."""
        if late_s > self.tolerated_s:
            self.seconds = min(2 * self.seconds + late_s, self.longest_s)


class RankClock:
    """The clock of rank 0, as this rank knows it."""

    def __init__(self, control: Control) -> None:
        self._control, self._at_s = control, -math.inf
        self.refresh()

    def refresh(self) -> None:
        """Measure the offset, unless that was not long ago."""
        if time.monotonic() - self._at_s > _MEASURE_EVERY_S:
            self.offset: ClockOffset = self._control.clock_offset()
            self._at_s = time.monotonic()

    def there(self, here_s: float) -> float:
        """Return the time of rank 0 at a moment of this rank's time.perf_counter."""
        return here_s + self.offset.offset_s

    def here(self, there_s: float) -> float:
        """Return the moment of this rank's time.perf_counter at a time of rank 0."""
        return there_s - self.offset.offset_s


class Steps:
    """The part of one rank in each command. Rank 0 uses it for its own part too.

    Every rank makes the calls of a command. Those without a job, and those after the first ones
    that the command is for, carry out nothing.
    """

    def __init__(self, control: Control, job: Job | None) -> None:
        self._control, self._job = control, job
        self._clock = RankClock(control)
        self.lead = Lead()

    def carry_out(self, message: dict[str, Any], release: Release | None = None) -> list[Any]:
        """Carry out the command in `message`; return the replies of all ranks in rank 0.

        A reply is `{"value": ...}`, or `{"error": text}` for a command that raised, or None of a
        rank that it is not for. A timed command begins in all ranks at one moment; `release` is
        called in rank 0 just before, with this moment. Raises RankError when a rank is lost, and
        KeyboardInterrupt.
        """
        name, job = str(message["do"]), self._job
        if self._control.world.rank >= message["count"]:
            job = None
        command = command_of(message)
        if message["timed"]:
            reply = self._timed(name, job, command, message, release)
        else:
            self._control.barrier(f"{name} begins", deadline_s=OPERATION_S)
            reply = None if job is None else _reply(partial(command, job))
        replies = self._control.gather(f"{name} done", reply, deadline_s=OPERATION_S)
        if job is not None:
            job.all_done()
        return replies

    def _timed(
        self,
        name: str,
        job: Job | None,
        command: Callable[[Job], Any],
        message: dict[str, Any],
        release: Release | None,
    ) -> dict[str, Any] | None:
        self._clock.refresh()
        if job is not None and (ref := message["with"].get("ref")):
            job.count(from_plain(CheckpointRef, ref))
        self._control.barrier(f"{name} begins", deadline_s=OPERATION_S)
        first = release is not None
        at_s = time.perf_counter() + self.lead.seconds if first else None
        there_s: float = self._control.broadcast(name, at_s, deadline_s=OPERATION_S)
        if job is None:
            return None
        before = Usage.now()
        if release is not None:
            release(there_s)
        late_s = wait_until(self._clock.here(there_s))

        def measured() -> Any:
            done = command(job)
            if not isinstance(done, Done):
                return done
            usage = None if first else Usage.now() - before
            done = replace(done, usage=usage, late_s=late_s)
            return done if first else self._in_time_of_rank_0(done, there_s)

        return _reply(measured)

    def _in_time_of_rank_0(self, done: Done, began_s: float) -> Done:
        """Return `done` with the times of rank 0's clock, none of them before the release."""
        ended_s = max(self._clock.there(done.at_s), began_s)
        first, last = math.ceil(began_s / TICK_S), int(ended_s / TICK_S)
        completed: Counter[int] = Counter()
        for tick, moved in done.transfer.completed.items():
            there = int(self._clock.there((tick + 0.5) * TICK_S) / TICK_S)
            completed[min(max(there, first), last)] += moved
        return replace(
            done,
            transfer=replace(done.transfer, completed=dict(completed)),
            at_s=ended_s,
            clock_error_s=self._clock.offset.error_s,
        )


def _reply(work: Callable[[], Any]) -> dict[str, Any]:
    """Return the reply of `work`, or the error that it raised, unless ranks were lost."""
    try:
        return {"value": to_plain(work())}
    except RankError:
        raise
    except Exception as error:  # noqa: BLE001 -- writers of others raise whatever they like
        return {"error": one_line(error)}
