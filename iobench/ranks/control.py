"""Control: how the ranks of a job agree. It never uses the trainer's process groups.

    control = Control.connect(World.detect())
    steps = control.all_gather("steps", ckpt.steps(), deadline_s=60)

Values are JSON. Each call has a deadline, its own one or that of the Control. When a rank ends,
fails, is silent or comes too late, every waiting rank gets a RankError at once that names this
rank, its host and its phase; afterwards all calls raise it. Only an `error` that a rank passes to a
call leaves the others usable. Ctrl-C in a call ends the job: this rank would not know what the
others have agreed on.

When a call returns, the other ranks need this process no more to return from it. So any rank may
end at once after the last call; only after `begin` that is not acknowledged rank 0 must make
another call.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from iobench.errors import RankError, UsageError
from iobench.ranks import calls
from iobench.ranks.calls import Member
from iobench.ranks.hub import Hub
from iobench.ranks.rendezvous import Interface, Meeting, meet
from iobench.ranks.wire import sendable
from iobench.ranks.world import OWN, World
from iobench.units import parse_seconds
from iobench.writers.s3_store.target import is_s3

LOST_AFTER_S = 300.0
"""Silence after which a rank is lost. The variable IOBENCH_LOST_AFTER gives another time.

A rank that ends is known at once. So this is for hosts that vanish, and must be longer than a
debugger, a frozen control group or the move of a virtual machine stops a rank.
"""

CONNECT_S = 300.0
"""How long the ranks may take to start. The variable IOBENCH_CONNECT gives another time."""

DEADLINE_S = 3600.0
"""Of the calls of a Control without another deadline."""

_CONNECT, _LOST_AFTER = "IOBENCH_CONNECT", "IOBENCH_LOST_AFTER"
_PATIENCE_S = 5.0
"""After which rank 0 warns that it waits for ranks to connect."""

_TRY_S = 10.0

_LATE_S = 10.0
"""How long rank 0, after a loss, waits for ranks that have not connected, to tell them of it."""

_RETRY_S = 0.05
_INTERRUPTED = 130  # the exit code after Ctrl-C
_PINGS = 20
_MOST_SHOWN = 20
_FOREVER_S = 1e9  # JSON has no infinity

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """`offset_s` to add to this rank's time.monotonic() to get that of rank 0.

    `error_s` is half of the shortest round trip: the offset is at most so wrong.
    """

    offset_s: float
    error_s: float


class Control:
    """The calls that all ranks make together, in the same order.

    Two threads that make calls at the same time need a `sub` each. `world.size` of 1 needs no
    connection: every call returns at once. `hosts` and `nodes` are those of the ranks.
    """

    def __init__(
        self,
        world: World,
        member: Member | None = None,
        hub: Hub | None = None,
        interface: Interface | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.world, self.interface, self.deadline_s = world, interface, deadline_s
        self.hosts, self.nodes = [world.host], [world.node]
        self._member, self._hub, self._name, self._aside = member, hub, "", False
        self._numbers = itertools.count()
        self._checkpointers = itertools.count(1)
        self._subs: dict[str, Control] = {}

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which has the lock of a directory and decides."""
        return self.world.rank == 0

    @property
    def many(self) -> bool:
        """Whether there is more than one rank."""
        return self.world.size > 1

    @classmethod
    def connect(cls, world: World, *, directory: Path | None = None) -> Control:
        """Connect all ranks of `world`. On return all of them are connected.

        `directory` is one that all ranks have for their data: rank 0 may publish its address there
        until all are connected. After 5 s rank 0 warns of the ranks that are missing
        (RuntimeWarning).

        Raises RankError when one is missing after the time of IOBENCH_CONNECT, and UsageError when
        nothing says where rank 0 is. A failure leaves nothing behind: the ranks may connect again.
        """
        if world.size == 1:
            return cls(world)
        deadline_s = _seconds(_CONNECT, CONNECT_S)
        lost_after_s = _seconds(_LOST_AFTER, LOST_AFTER_S)
        until_s = time.monotonic() + deadline_s
        meeting = meet(world, deadline_s=deadline_s, directory=directory)
        hub = member = None
        try:
            if meeting.server is not None:
                hub = Hub(
                    meeting.server,
                    size=world.size,
                    token=meeting.token,
                    host=world.host,
                    lost_after_s=lost_after_s,
                )
            member = _connected(world, meeting, until_s, lost_after_s)
            control = cls(world, member, hub, meeting.interface)
            if hub is not None and deadline_s > _PATIENCE_S:
                _warn_of_missing(hub, deadline_s)
            left_s = max(1.0, until_s - time.monotonic())
            places = control.all_gather("connect", [world.host, world.node], deadline_s=left_s)
            control.hosts = hosts = [host for host, _ in places]
            control.nodes = [node for _, node in places]
            if not world.placed:
                control.nodes = list(map(list(dict.fromkeys(hosts)).index, hosts))
                control.world = world.on(control.nodes)
        except BaseException as error:
            if hub is not None:
                if isinstance(error, RankError):
                    hub.missing(min(_LATE_S, until_s - time.monotonic()), broken=True)
                hub.abandon(f"rank 0 (host {world.host}) failed: {type(error).__name__}: {error}")
            if member is not None:
                member.close()
            raise
        finally:
            meeting.withdraw()
        return control

    def sub(self, name: str, *, aside: bool = False, deadline_s: float | None = None) -> Control:
        """Return the control plane for another use, with calls of its own.

        With `aside` its phases are not those that errors name: it waits in the background.
        """
        if name not in self._subs:
            made = Control(self.world, self._member, interface=self.interface)
            made.hosts, made.nodes = self.hosts, self.nodes
            made._name, made._aside = f"{self._name}/{name}", aside
            self._subs[name] = made
        found = self._subs[name]
        found.deadline_s = self.deadline_s if deadline_s is None else deadline_s
        return found

    def all_gather(
        self,
        phase: str,
        value: Any = None,
        *,
        deadline_s: float | None = None,
        error: object = None,
    ) -> list[Any]:
        """Return the values of all ranks, in rank order, in every rank.

        Equal ones may be one object.

        A rank that passes an `error` makes the call raise RankError in all ranks; further calls
        work.
        """
        return self.begin("all-gather", phase, value, deadline_s=deadline_s, error=error)()

    def gather(
        self, phase: str, value: Any = None, *, deadline_s: float | None = None
    ) -> list[Any]:
        """Return the values of all ranks in rank 0, and an empty list in the others."""
        return self.begin("gather", phase, value, deadline_s=deadline_s)()

    def broadcast(self, phase: str, value: Any = None, *, deadline_s: float | None = None) -> Any:
        """Return the value of rank 0 in every rank."""
        return self.begin("broadcast", phase, value, deadline_s=deadline_s)()[0]

    def scatter(
        self, phase: str, values: list[Any] | None = None, *, deadline_s: float | None = None
    ) -> Any:
        """Return in each rank its own one of the `values` that rank 0 gives, in rank order."""
        return self.begin("scatter", phase, values, deadline_s=deadline_s)()[0]

    def barrier(self, phase: str, *, deadline_s: float | None = None, error: object = None) -> None:
        """Return when all ranks have made this call."""
        self.all_gather(phase, deadline_s=deadline_s, error=error)

    def together(
        self,
        phase: str,
        work: Callable[[], T],
        tell: Callable[[T], Any] | None = None,
        *,
        kind: calls.CallKind = "all-gather",
    ) -> tuple[T, list[Any]]:
        """Call `work` in every rank. Return its result, and those of all ranks, in rank order.

        `tell` makes JSON of a result for the others; without it the result is JSON itself. With
        `kind` "gather" only rank 0 gets the list; it is empty in the others. With "scatter" the
        result of rank 0 is a list, and each rank gets its own item of it, as the only one.

        If either raises, so does this in every rank: the rank's own error where it happened, a
        RankError that names the rank in the others. The ranks can go on after that.
        """
        own, answer = self.begin_together(phase, work, tell, kind=kind, acknowledged=True)
        return own, answer()

    def begin_together(
        self,
        phase: str,
        work: Callable[[], T],
        tell: Callable[[T], Any] | None = None,
        *,
        kind: calls.CallKind = "all-gather",
        acknowledged: bool = False,
    ) -> tuple[T, Callable[[], list[Any]]]:
        """Like `together`, but return a function that waits for the results of all ranks.

        Call it once. An error of `work` is raised at once, after the other ranks have got it.
        Unless `acknowledged`, rank 0 does not wait until the others have the values: a trainer
        waits for this.
        """
        own, value, failure = cast(T, None), None, None
        try:
            own = work()
            value = own if tell is None else tell(own)
        except Exception as error:
            if not self.many:
                raise
            failure = error
        try:
            answer = self.begin(kind, phase, value, error=failure, acknowledged=acknowledged)
            if failure is not None:
                answer()  # it raises in all ranks
        except RankError as theirs:
            if failure is not None:
                raise failure from theirs
            raise
        return own, answer

    def agreed(self, phase: str, work: Callable[[], Any]) -> list[Any]:
        """Return the results of `work` in all ranks. An error is raised in all of them."""
        return self.together(phase, work)[1]

    def led(self, phase: str, ask: Callable[[], T]) -> T:
        """Return in all ranks what `ask` returns in rank 0, as JSON; raise what it raises."""
        told: list[T] = self.agreed(phase, lambda: ask() if self.leads else None)
        return told[0]

    def distinct(self, phase: str, work: Callable[[], T]) -> list[T]:
        """Return the results of `work` in all ranks, in rank order, as JSON. See `together`.

        Equal ones are sent once: the ranks compare hashes first.
        """

        def digest(value: T) -> str:
            return hashlib.sha256(calls.json_bytes(value)).hexdigest()

        if not self.many:
            return [work()]
        own, digests = self.together(phase, work, digest)
        first = [digests.index(one) for one in digests]
        if not any(first):
            return [own] * len(first)
        rank = self.world.rank
        every = self.all_gather(phase, own if first[rank] == rank else None)
        return [every[one] for one in first]

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on. Their calls raise RankError."""
        if self._member is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            code = _INTERRUPTED if interrupted else getattr(error, "exit_code", 1)
            self._member.fail(f"{type(error).__name__}: {error}".removesuffix(": "), int(code))

    def check(self) -> None:
        """Raise RankError if a rank was lost: for a wait on something else than these calls."""
        if self._member is not None:
            self._member.check()

    @property
    def broken(self) -> bool:
        """Whether a rank was lost, so that every further call raises RankError."""
        return self._member is not None and self._member.broken

    def clock_offset(self) -> ClockOffset:
        """Measure the offset of CLOCK_MONOTONIC to that of rank 0. No other rank has to call it."""
        if self._member is None or self.world.rank == 0 or self.world.launcher == OWN:
            return ClockOffset(offset_s=0.0, error_s=0.0)  # processes of this machine have one
        trips = [self._member.ping(number) for number in range(_PINGS)]
        before_s, there_s, after_s = min(trips, key=lambda trip: trip[2] - trip[0])
        half_s = (after_s - before_s) / 2
        return ClockOffset(offset_s=there_s - (before_s + half_s), error_s=half_s)

    def still_here(self, timeout_s: float) -> list[int]:
        """In rank 0, wait until the other ranks have left; return those that have not then.

        A rank that left uses nothing of the job any more. Works after a failure too.
        """
        if self._hub is None:
            return []
        until_s = time.monotonic() + timeout_s
        while (ranks := self._hub.still_here()) and time.monotonic() < until_s:
            time.sleep(_RETRY_S)
        return ranks

    def close(self) -> None:
        """Leave the job. A second call does nothing. Rank 0 waits for the others to leave."""
        if self._member is not None:
            self._member.close()
        if self._hub is not None:
            self._hub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, RankError):
            self.fail(error)
        self.close()

    def begin(
        self,
        kind: calls.CallKind,
        phase: str,
        value: Any,
        *,
        deadline_s: float | None = None,
        error: object = None,
        acknowledged: bool = True,
    ) -> Callable[[], list[Any]]:
        """Send the value of this rank. Return a function that waits for the answer.

        Call it once. Unless `acknowledged`, it returns in rank 0 before the others have theirs.
        """
        if self._member is None:
            if error is not None:
                raise RankError(f"{self.world}, {phase!r}: {error}", ranks=[0])
            return lambda: list(value) if kind == "scatter" else [value]
        call = calls.Call(
            key=(self._name, next(self._numbers)),
            kind=kind,
            phase=sendable(phase),
            deadline_s=min(self.deadline_s if deadline_s is None else deadline_s, _FOREVER_S),
            aside=self._aside,
            error=None if error is None else sendable(str(error)),
            acknowledged=acknowledged,
        )
        lines = value if kind == "scatter" and value is not None else [value]
        wait = self._member.begin(call, b"\n".join(map(calls.json_bytes, lines)))
        return partial(self._values, call, wait)

    def _values(
        self, call: calls.Call, wait: Callable[[], tuple[calls.CallAnswer, bytearray]]
    ) -> list[Any]:
        """Return the values of an answer. Raises RankError if it has errors."""
        try:
            answer, text = wait()
        except BaseException as error:
            if not isinstance(
                error, Exception
            ):  # Ctrl-C: the others do what was agreed, without it
                self.fail(error)
            raise
        if answer.errors:
            raise RankError(
                "; ".join(
                    f"rank {r} (host {host}), {call.phase!r}: {e}" for r, host, e in answer.errors
                ),
                ranks=[rank for rank, _, _ in answer.errors],
            )
        values: list[Any] = json.loads(b"[%b]" % bytes(text))
        return values * answer.times


def _seconds(variable: str, default_s: float) -> float:
    """Return the time that the environment variable gives. Raises UsageError, OptionError."""
    found = os.environ.get(variable)
    if not found:
        return default_s
    seconds = parse_seconds(found, variable)
    if seconds <= 0:
        raise UsageError(f"{variable}={found}: must be more than 0")
    return seconds


def some_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 3, 5`, with the first 20 of them."""
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN]))
    more = f" and {len(ranks) - _MOST_SHOWN} more" if len(ranks) > _MOST_SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _warn_of_missing(hub: Hub, deadline_s: float) -> None:
    """Wait a little for all ranks; warn of those that have not connected."""
    missing = hub.missing(_PATIENCE_S)
    if missing and not hub.broken:
        warnings.warn(
            f"rank 0 waits for {some_ranks(missing)}: not connected within {_PATIENCE_S:g} s; "
            f"rank 0 fails after {deadline_s:g} s ({_CONNECT} gives another time); "
            f"{calls.EVERY_RANK}",
            RuntimeWarning,
            stacklevel=3,
        )


def _connected(world: World, meeting: Meeting, until_s: float, lost_after_s: float) -> Member:
    """Connect to the hub, again until it listens. Raises RankError after `until_s`."""
    while True:
        host, port = meeting.address
        connection = None
        try:
            timeout_s = min(_TRY_S, max(1.0, until_s - time.monotonic()))
            connection = socket.create_connection((host, port), timeout=timeout_s)
            return Member(
                connection,
                rank=world.rank,
                token=meeting.token,
                host=world.host,
                lost_after_s=lost_after_s,
            )
        except OSError as error:
            failure = error
            if connection is not None:
                connection.close()
            if meeting.again is not None:  # the address was that of an earlier start
                meeting = meeting.again()
        if time.monotonic() >= until_s:
            where = f"{host}:{port} from {world}"
            raise RankError(f"rank 0 cannot be reached at {where}: {failure}", ranks=[0])
        time.sleep(_RETRY_S)


_shared: Control | None = None
_sharing = threading.Lock()


def shared_control(world: World, directory: Path | None = None) -> Control:
    """Return the connection of this process to the ranks of `world`; connect at the first call.

    Every user takes a `sub` of it. It lives as long as the process. `directory`: see `connect`.
    One rank alone needs none.
    """
    global _shared
    if world.size == 1:
        return Control(world)
    with _sharing:
        if _shared is None or not _shared.world.same_rank(world):
            if _shared is not None:
                raise UsageError(f"this process is {_shared.world} of another job already")
            _shared = Control.connect(world, directory=directory)
        return _shared


def checkpointer_control(world: World, location: str | Path, deadline_s: float) -> Control:
    """Connect the ranks of `world`, each of which makes a Checkpointer of `location` now."""
    shared = shared_control(world, None if is_s3(location) else Path(location))
    # All ranks make their Checkpointers in the same order.
    return shared.sub(f"checkpointer {next(shared._checkpointers)}", deadline_s=deadline_s)


ALONE = Control(World.single(), deadline_s=math.inf)
"""This process only: no call asks another one."""
