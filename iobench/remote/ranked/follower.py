"""DrainFollower: moves this rank's share of each checkpoint for the drain of rank 0."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from iobench import linux
from iobench.checkpoint.copies import Copy
from iobench.checkpoint.manifest import FileRecord
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import IobenchError, RankError, UsageError
from iobench.ranks.control import Control
from iobench.remote.file_copier import FileCopier
from iobench.remote.pace import DrainPace
from iobench.remote.queue import Queued
from iobench.remote.ranked.messages import NEXT, NO_DEADLINE_S, REPLY, shown_error, states_of
from iobench.remote.remote import RemoteTier
from iobench.writers.blocks import interpreter_end

__all__ = ["DrainFollower"]

_NICE = 10
_JOIN_S = 10.0
_REMEMBERED = 1000  # saves


class DrainFollower:
    """A thread in each rank but rank 0. It does what the RankCopier of rank 0 asks for.

    It decides nothing: which checkpoint is copied, tried again or given up is up to rank 0. An
    error is an answer, and is raised there. The thread ends with the drain, or when a rank is lost.
    """

    def __init__(self, control: Control, local: DirectoryStore, remote: RemoteTier) -> None:
        self._control, self._local, self._remote = control, local, remote
        self._pace = DrainPace(remote.options.rate_bytes_per_s, self._must_yield)
        self._copier = FileCopier(local=local, remote=remote, pace=self._pace, offload=lambda: None)
        self._saving, self._hurry_at_s = 0, math.inf
        self._serials: dict[int, int] = {}
        self._lock = threading.Lock()
        self._direct: dict[int, tuple[int, float]] = {}
        self._states: dict[int, Queued] = {}
        self.on_durable: Callable[[int], None] | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="iobench-drain", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        interpreter_end.at_end(self, DrainFollower.stop)

    @contextmanager
    def saving(self, step: int, serial: int) -> Iterator[None]:
        """Let the copies wait while this rank writes its part of a save in the body."""
        self._saving += 1
        try:
            yield
        finally:
            self._saving -= 1
            with self._lock:
                last = dict(list(self._serials.items())[-_REMEMBERED:])
                self._serials = {**last, step: serial}

    def _must_yield(self) -> bool:
        return self._saving > 0 and time.monotonic() < self._hurry_at_s

    def sent_directly(self, step: int, serial: int) -> None:
        """Record a save that is durable in the remote tier, and not in the local one."""
        last = dict(list(self._direct.items())[-_REMEMBERED:])
        self._direct = {**last, step: (serial, time.time())}
        if self.on_durable is not None:
            self.on_durable(step)

    def copies(self, save: Save) -> list[Copy]:
        """Return where the copies of `save` are, nearest first, as rank 0 said last."""
        if save.on_the_way:
            return [Copy(tier="memory", state="volatile")]
        if save.status != "committed":
            return []
        found, serial = self._states.get(save.step), self._serials.get(save.step)
        if serial is None:  # no tier has it any more, or it is older than all that is remembered
            return []
        direct, at_s = self._direct.get(save.step, (None, 0.0))
        if direct is not None and direct == serial:
            return [Copy(tier=str(self._remote), state="durable", durable_at_s=at_s)]
        local = Copy(tier=str(self._local), state="durable")
        if found is None or found.serial != serial:
            return [local, Copy(tier=str(self._remote), state="waiting")]
        return [*([local] if found.local else []), found.copy_in(str(self._remote))]

    def stop(self) -> None:
        """End the thread, when rank 0 ends its own. A second call does nothing."""
        if os.getpid() != self._pid:
            return
        self._pace.stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # at the trainer's priority then
            linux.yield_to_others(_NICE)
        # RankError: the trainer's thread raises it. UsageError: the connection was closed.
        with contextlib.suppress(RankError, UsageError):
            while (order := self._next())["do"] != "end":
                if order["do"] == "note":
                    self._note(order)
                    continue
                answer = {"host": self._control.world.host, **self._done(order)}
                self._control.gather(REPLY, answer, deadline_s=NO_DEADLINE_S)
        with contextlib.suppress(IobenchError):
            self._remote.close()

    def _next(self) -> dict[str, Any]:
        found: dict[str, Any] = self._control.scatter(NEXT, deadline_s=NO_DEADLINE_S)
        return found

    def _note(self, order: dict[str, Any]) -> None:
        """Learn the states that have changed, and which checkpoints no tier has any more."""
        before, changed = self._states, states_of(order["states"])
        states = {**before, **changed}
        for step, serial in order["gone"]:
            states.pop(step, None)
            with self._lock:
                if self._serials.get(step) == serial:
                    del self._serials[step]
        self._states = states
        for step, one in changed.items():
            if (
                self.on_durable is not None
                and one.is_there
                and not ((was := before.get(step)) and was.serial == one.serial and was.is_there)
            ):
                self.on_durable(step)

    def _done(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return the answer, also of what fails in any way: rank 0 waits for it."""
        try:
            files = msgspec.convert(order["files"], list[FileRecord])
            self._hurry_at_s = time.monotonic() + order["hurry_after_s"]
            self._pace.begin()
            if order["do"] == "read back":
                self._copier.read_back(order["place"], files)
                return {"sent": 0}
            if order["do"] == "compare":
                self._copier.compare_local(order["step"], files)
                return {"sent": 0}
            step, serial = order["step"], order["serial"]
            self._states = {**self._states, **states_of([[step, serial, "draining", None, True]])}
            return {"sent": self._copier.send(step, serial, order["place"], files)}
        except Exception as error:  # noqa: BLE001 -- rank 0 raises it
            with contextlib.suppress(Exception):  # of a client: the next order asks for it again
                self._remote.renew()
            return {"error": shown_error(error)}
