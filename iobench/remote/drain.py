"""Drain: copies the checkpoints of a directory to the remote tier, in the background."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from iobench import linux
from iobench.checkpoint.manifest import FileRecord
from iobench.checkpoint.rate_limit import RateLimit, StoppedError
from iobench.checkpoint.retention import readable_manifest
from iobench.checkpoint.save import CopyState, Save
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import IobenchError, RankError, TargetError, TransferError, UsageError
from iobench.ranks.control import ALONE, Control
from iobench.remote.file_copier import FileCopier, shown_error
from iobench.remote.journal import DrainEvent, DrainJournal, Event
from iobench.remote.placement import LOCAL, REMOTE, TierHistory, estimate
from iobench.remote.queue import NOT_DURABLE, PENDING, DrainQueue, Queued
from iobench.remote.remote import RemoteTier
from iobench.remote.source_file import LocalDamageError
from iobench.units import format_seconds
from iobench.writers.blocks import interpreter_end


def late(waiting: Sequence[Queued], limit_s: float, now_s: float) -> list[tuple[Queued, str]]:
    """Return those of `waiting` that have waited longer than `limit_s`, each with the reason."""
    return [
        (one, f"it waited {format_seconds(age_s)}, max_backlog is {format_seconds(limit_s)}")
        for one in waiting
        if (age_s := now_s - one.since_s) > limit_s
    ]


_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_GROWTH = 0.5, 300.0, 1.5
"""Of the attempts after a failure: an outage is noticed to be over after half of its time more."""


def pause_after(failures: int) -> float:
    """Return the seconds between `failures` failed attempts in a row and the next one."""
    growth = _PAUSE_GROWTH ** min(failures - 1, 40)
    return min(_FIRST_PAUSE_S * growth, _LONGEST_PAUSE_S)


_NO_DEADLINE_S = 1e9
"""A copy takes as long as it takes. A rank that is lost meanwhile is found by its silence."""
_NICE = 10
_JOIN_S = 10.0
_LOOK_AGAIN_S = 1.0


def sizes_of(store: DirectoryStore, step: int) -> tuple[int, int]:
    """Return the bytes of all files of a checkpoint, and those of its optimizer state.

    A remote tier gets both. 0 for what cannot be listed or read.
    """
    stored = 0
    with contextlib.suppress(OSError):
        files = [path for path in store.locate(step).rglob("*") if path.is_file()]
        stored = sum(path.stat().st_size for path in files)
    manifest = readable_manifest(store, step, files=False)
    return stored, sum(file.size_bytes for file in manifest.remote_files) if manifest else 0


class Drain:
    """A thread that copies each checkpoint of `local`, the last saved one first.

    Every copy is then read back. What is done is in the two tiers themselves, so a process that
    is killed at any moment goes on when it is started again. Errors never reach the trainer except
    by `wait`: the drain tries again after 0.5 s, 0.75 s and so on, up to 5 minutes.

    In a job of several ranks each rank moves its own files. Rank 0 decides which checkpoint is
    copied, tried again or given up, and publishes; a thread in each other rank does what it asks
    for. `start`, `wait`, `finish` and `wait_for_backlog` are calls of all ranks then.
    """

    failures = 0
    """How many attempts have failed."""
    failure: Exception | None = None
    """Why the last attempt failed; None after a success."""

    def __init__(
        self,
        local: DirectoryStore,
        remote: RemoteTier,
        rates: TierHistory,
        ranks: Control = ALONE,
    ) -> None:
        self._local, self.remote, self._ranks = local, remote, ranks
        self._waits = ranks.sub("waits for copies", deadline_s=_NO_DEADLINE_S)
        self.leads = ranks.leads
        self.queue = DrainQueue(in_order=remote.options.every_save)
        self._max_backlog_s = remote.options.max_backlog_s
        self.journal = DrainJournal(local.directory)
        self._limit = RateLimit(remote.options.rate_bytes_per_s, self._must_yield)
        self.copier = FileCopier(
            local=local,
            remote=remote,
            queue=self.queue,
            limit=self._limit,
            control=ranks.sub("drain", aside=True, deadline_s=_NO_DEADLINE_S),
        )
        self._saving = self._failed_in_a_row = 0
        self._rates = rates
        self.untidy = False
        """Whether something unfinished may be in the remote tier, to be removed when it answers."""
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="iobench-drain", daemon=True)

    def start(self, ages: Callable[[], Mapping[int, tuple[int, float]]]) -> None:
        """Start the thread. `ages` returns serial numbers and times of the local checkpoints.

        They wait from now on: the time before does not count. Raises TransferError when the journal
        cannot be read, TargetError when it is a link or not a regular file.
        """
        self._ranks.led("drain", lambda: self._look_at_local(ages()))
        self._thread.start()
        interpreter_end.at_end(self, Drain.stop)

    def _look_at_local(self, ages: Mapping[int, tuple[int, float]]) -> None:
        for step, (serial, created_s) in ages.items():
            self._put(step, serial, created_s)
        self.journal.shorten()
        self._note("remote")

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let the copies wait while a save is being written in the body."""
        self._saving += 1
        try:
            yield
        finally:
            self._saving -= 1

    def _put(self, step: int, serial: int, created_s: float) -> tuple[Queued, int]:
        """Queue a local checkpoint; return its entry, and the bytes in its directory."""
        stored, more = sizes_of(self._local, step)
        entry = Queued(
            step=step,
            serial=serial,
            since_s=time.monotonic(),
            created_s=created_s,
            size_bytes=stored + more,
        )
        self.queue.put(entry)
        return entry, stored

    def saved(self, step: int, serial: int, elapsed_s: float) -> None:
        """Queue a checkpoint that is durable in the local tier since now."""
        entry, stored = self._put(step, serial, time.time())
        self._note("saved", replace(entry, size_bytes=stored), elapsed_s=elapsed_s)
        self._rates.add(LOCAL, stored, elapsed_s)

    def sent_directly(self, save: Save, serial: int, size_bytes: int, elapsed_s: float) -> None:
        """Record a save that is durable in the remote tier, and not in the local one."""
        entry = Queued.of(save, serial, size_bytes=size_bytes, direct=True)
        self.queue.put(entry)
        self._note("durable", entry, sent_bytes=size_bytes, elapsed_s=elapsed_s)
        self._rates.add(REMOTE, size_bytes, elapsed_s)

    def wait_for_backlog(self) -> float:
        """Let a save wait while the backlog exceeds its limit; return the seconds.

        It does not wait for a remote tier that fails, or if saves never wait.
        """
        if self.remote.options.past_backlog != "wait":
            return 0.0
        self._ranks.barrier("backlog")  # a rank that does not save is missed within the deadline
        return self._waits.led("backlog", self._wait_for_backlog)

    def _wait_for_backlog(self) -> float:
        began_s, waited_s = time.monotonic(), 0.0
        with self.queue.changed:
            while self.failure is None and self._thread.is_alive():
                if not self._late(self.queue.not_durable()):
                    break
                self.queue.changed.wait(_LOOK_AGAIN_S)
                waited_s = time.monotonic() - began_s
        return waited_s

    def wait(self, *, failing: bool = False) -> None:
        """Wait until every checkpoint is durable in the remote tier, or given up.

        Raises the error of an attempt that fails meanwhile; the next attempts go on. Raises
        TransferError if the drain was stopped. With `failing` it does not wait for a remote tier
        that fails, and a RuntimeWarning has the steps that are not there.
        """
        seen = self._ranks.led("remote tier", lambda: -1 if failing else self.failures)
        self._waits.led("wait for copies", lambda: self._wait(seen, failing))

    def _wait(self, seen: int, failing: bool) -> None:
        """Wait in rank 0. A failure counts if there were `seen` ones before it."""
        with self.queue.changed:
            while self.queue.not_durable() and self._thread.is_alive():
                if self.failure is not None and self.failures > seen:
                    break
                self.queue.changed.wait(_LOOK_AGAIN_S)
            failure = self.failure if self.failures > seen else None
            left = sorted(one.step for one in self.queue.not_durable())
        if left and failing:
            warnings.warn(
                f"steps {left} are not in {self.remote} yet ({failure}); they are "
                "in the local tier, and the next Checkpointer of it goes on",
                RuntimeWarning,
                stacklevel=4,
            )
        elif left:
            ended = f"the drain has ended; steps {left} are not in {self.remote}"
            raise failure or TransferError(ended)

    def eta_s(self, step: int) -> float | None:
        """Return the seconds until `step` is expected in the remote tier; None if unknown."""
        found, ahead = estimate(tuple(self._rates.seen[REMOTE])), self.queue.to_copy()
        steps = [one.step for one in ahead]
        if found is None or step not in steps:
            return None
        return found.seconds(sum(one.size_bytes for one in ahead[: steps.index(step) + 1]))

    def stop(self) -> bool:
        """End the thread; a copy goes on later from where it was. A second call does nothing.

        Return whether it has ended, after 10 s at most: an answer of the remote tier takes longer.
        """
        if os.getpid() != self._pid:
            return True
        self._limit.stop.set()
        with self.queue.changed:
            self.queue.changed.notify_all()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        return not self._thread.is_alive()

    def _must_yield(self) -> bool:
        waiting, half_s = self.queue.not_durable(), self._max_backlog_s / 2
        return self._saving > 0 and not late(waiting, half_s, time.monotonic())

    def _late(self, waiting: Sequence[Queued]) -> list[tuple[Queued, str]]:
        return late(waiting, self._max_backlog_s, time.monotonic())

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # at the trainer's priority then
            linux.yield_to_others(_NICE)
        (self._lead if self.leads else self._follow)()
        with contextlib.suppress(IobenchError):
            self.remote.close()

    def _follow(self) -> None:
        """Do what rank 0 asks for, until the drain ends or a rank is lost."""
        # RankError: the trainer's thread raises it. UsageError: the connection was closed.
        with contextlib.suppress(RankError, UsageError):
            while (order := self.copier.next())["do"] != "end":
                if order["do"] == "note":
                    for entry in msgspec.convert(order["states"], list[Queued]):
                        self.queue.learn(entry)
                    for step, serial in order["gone"]:
                        self.queue.forget(step, serial)
                else:
                    self.copier.answer(self._answer(order))

    def _answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return the answer, also of what fails in any way: rank 0 waits for it."""
        try:
            files = msgspec.convert(order["files"], list[FileRecord])
            self._limit.begin()
            if order["do"] == "send":
                entry = self.queue.get(order["step"])
                if entry is not None and entry.serial == order["serial"]:
                    self.queue.move(entry, "draining", of=NOT_DURABLE)
            return {"sent": self.copier.done(order, files)}
        except Exception as error:  # noqa: BLE001 -- rank 0 raises it
            with contextlib.suppress(Exception):  # of a client: the next order asks for it again
                self.remote.renew()
            return {"error": shown_error(error)}

    def _lead(self) -> None:
        while not self._limit.stop.is_set():
            try:
                self._give_up_late()
                if not self.remote.is_open:
                    self._look_at_remote()
                self._give_up_unkept()
                self._tidy()
                self.copier.tell(self.queue.entries())  # each of them, before it is forgotten
                self.queue.forget_settled(self.remote.holds if self.remote.is_open else None)
                self._work()
            except StoppedError:
                break
            except RankError as error:  # another rank is lost: the next start of the job goes on
                self.failures += 1
                self._set_failure(error)
                break
            except Exception as error:  # noqa: BLE001 -- tried again; `wait` raises it
                self._fail(error)
        with contextlib.suppress(IobenchError):  # its process ends; the next one tidies up
            self.copier.end()

    def _work(self) -> None:
        """Work on the next checkpoint, or wait until there is one."""
        with self.queue.changed:
            entry = self.queue.next()
            if entry is None:
                self._succeeded()
                self.queue.changed.wait(_LOOK_AGAIN_S)
                return
        try:
            self._work_on(entry)
        except LocalDamageError as error:
            self._local_failed(entry, error)
        except Exception:
            if self.queue.has(entry):
                raise
            self.untidy = True  # removed, saved anew or given up meanwhile
        self._succeeded()

    def _succeeded(self) -> None:
        self._failed_in_a_row = 0
        if self.failure is not None:
            self._set_failure(None)

    def _work_on(self, entry: Queued) -> None:
        began_s, yielded_s = time.monotonic(), self._limit.yielded_s
        if entry.state == "durable":
            verified = self.copier.verify(entry)
            self._note("verified" if verified else "dropped", entry)
        elif (sent := self.copier.copy(entry)) is not None:
            paused_s = self._limit.yielded_s - yielded_s
            self._copied(entry, sent, time.monotonic() - began_s - paused_s)
        else:
            self.untidy = True  # removed, saved anew or given up meanwhile

    def _local_failed(self, entry: Queued, error: LocalDamageError) -> None:
        """Settle a checkpoint whose local files are removed or damaged."""
        self.untidy = True
        if not self._local.locate(entry.step).exists():
            self.queue.forget(entry.step, entry.serial)
        elif self.queue.move(entry, "failed", of=PENDING):
            self._note("failed", entry, why=str(error))
            self._tell(f"step {entry.step} is not copied to {self.remote}: {error}")

    def _copied(self, entry: Queued, sent_bytes: int, elapsed_s: float) -> None:
        """Record a copy; `elapsed_s` is without the pauses for saves."""
        self._note("durable", entry, sent_bytes=sent_bytes, elapsed_s=elapsed_s)
        if sent_bytes:
            self._rates.add(REMOTE, sent_bytes, elapsed_s)

    def _look_at_remote(self) -> None:
        """Settle what the remote tier has. Given up copies stay given up."""
        name = str(self.remote)  # another one has other copies
        known = [one for one in self.journal.read()[0] if one.remote == name]
        last = {(one.step, one.serial): one.event for one in known if one.step >= 0}
        waiting = [one.step for one in self.queue.not_durable()]
        serials = self.remote.open(waiting)
        newest = next(iter(self.queue.entries()), None)
        for entry in self.queue.not_durable():
            before = last.get((entry.step, entry.serial))
            if serials.get(entry.step) == entry.serial:
                there: CopyState = "verified" if before == "verified" else "durable"
                self.queue.move(entry, there, of=NOT_DURABLE)
            elif serials.get(entry.step, 0) > entry.serial:
                self._supersede(entry, "another node has saved this step later")
            elif before == "dropped" and entry != newest:
                self.queue.move(entry, "dropped", of=NOT_DURABLE)

    def _give_up_late(self) -> None:
        """Drop copies past the limit of the backlog, except that of the newest save."""
        if self.remote.options.past_backlog != "drop":
            return
        for entry, why in self._late(self.queue.not_durable()[1:]):
            self._supersede(entry, why)
            self._tell(f"step {entry.step} is not copied to {self.remote}: {why}")

    def _give_up_unkept(self) -> None:
        """Drop copies that the retention of the remote tier would not keep."""
        waiting = self.queue.not_durable()
        if len(waiting) > 1 and not self.remote.options.every_save:
            ages = {one.step: (one.serial, one.created_s) for one in waiting}
            kept = self.remote.would_keep(ages)
            for entry in waiting[1:]:
                if entry.step not in kept:
                    self._supersede(entry, "the retention there would not keep it")

    def _tidy(self) -> None:
        """Remove unfinished copies that nothing waits for any more."""
        if self.untidy:
            self.remote.tidy([one.step for one in self.queue.not_durable()])
            self.untidy = False

    def settle_one(self) -> bool:
        """Wait until one checkpoint more is read back; False if that will not happen.

        A remote tier that fails: the oldest copy is given up, unless every save must be copied. In
        a job of one rank.
        """
        with self.queue.changed:
            before = {one.serial for one in self.queue.pending()}
            while self.failure is None and self._thread.is_alive():
                if not before or before - {one.serial for one in self.queue.pending()}:
                    return bool(before)
                self.queue.changed.wait(_LOOK_AGAIN_S)
            left = self.queue.pending()[1:]
            if self.failure is None or not left or self.remote.options.every_save:
                return False
            why = "the optimizer has no pin left, and the remote tier fails"
            self._supersede(left[-1], why)
        self._tell(f"step {left[-1].step} is not copied to {self.remote}: {why}")
        return True

    def _supersede(self, entry: Queued, why: str) -> None:
        self.untidy = self.untidy or entry.state == "draining"
        if self.queue.move(entry, "dropped", of=PENDING):
            self._note("dropped", entry, why=why)

    def _fail(self, error: Exception) -> None:
        """Record a failed attempt and wait before the next one."""
        self._failed_in_a_row += 1
        self.failures += 1
        self._note("failed", why=str(error))
        self._rates.add(REMOTE, 0, 0.0, ok=False)
        if self._failed_in_a_row == 1:
            self._tell(f"copies to {self.remote} wait, and are tried again: {error}")
        self._set_failure(error)
        self._limit.stop.wait(pause_after(self._failed_in_a_row) * random.uniform(0.5, 1.0))
        with contextlib.suppress(IobenchError):
            self.remote.renew()

    def _set_failure(self, error: Exception | None) -> None:
        with self.queue.changed:
            self.failure = error
            self.queue.changed.notify_all()

    def _note(self, event: Event, entry: Queued | None = None, **more: object) -> None:
        """Write to the journal. It is not the truth: without it, more is read back, that is all."""
        own = {} if entry is None else {
            "step": entry.step, "serial": entry.serial, "size_bytes": entry.size_bytes,
        }  # fmt: skip
        with contextlib.suppress(TransferError, TargetError):
            self.journal.add(
                DrainEvent(event=event, at_s=time.time(), remote=str(self.remote), **own, **more)  # type: ignore[arg-type]  # fields of DrainEvent
            )

    def _tell(self, message: str) -> None:
        with contextlib.suppress(RuntimeWarning):  # a filter may raise it; no caller is here
            warnings.warn(message, RuntimeWarning, stacklevel=2)
