"""simulate: what a TiersPlan does, event by event; a pure function with exact arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from iobench.tiers.plan import PlannedSave, Prediction, TiersPlan
from iobench.tiers.spill import next_to_write

__all__ = ["simulate"]

_MOST_EVENTS = 1_000_000


def simulate(plan: TiersPlan) -> Prediction:
    """Return what happens to each save of `plan`.

    The rules are those of a Checkpointer with memory tiers. A save waits for memory, then for its
    copy. One snapshot is written at a time: with `every_save` the oldest, else the newest in the
    scarcest memory. Copies to the remote tier pause while a snapshot is written, until the lag is
    half of its limit. Each copy is read back at the same rate when no copy waits. Times are
    fractions, so equal plans give equal results to the last digit.
    """
    run = _Run(plan)
    for _ in range(_MOST_EVENTS):
        run.begin_work()
        after = run.next_event()
        if after is None:
            return run.prediction()
        run.advance(after)
    raise AssertionError("the simulation does not end")


@dataclass
class _Job:
    """A save on its way through the tiers."""

    number: int
    at: Fraction
    trained: Fraction
    called: Fraction | None = None  # when it has waited for the lag
    lag_wait: Fraction = Fraction(0)
    memory_wait: Fraction = Fraction(0)
    copy: Fraction = Fraction(0)
    slot: int | None = None
    parts: tuple[int, ...] = ()
    used: tuple[int, ...] = ()
    end: Literal["durable", "superseded", "skipped"] = "durable"
    local: Fraction | None = None
    remote: Fraction | None = None


@dataclass
class _Transfer:
    """Work of one tier: the bytes that are left."""

    job: _Job
    left: Fraction
    reads_back: bool = False


class _Run:
    """The state between two events."""

    def __init__(self, plan: TiersPlan) -> None:
        self.plan = plan
        self.now = Fraction(0)
        self.every = Fraction(plan.every_s).limit_denominator(10**9)
        self.max_lag = Fraction(plan.max_lag_s).limit_denominator(10**9)
        self.jobs: list[_Job] = []
        self.saving: _Job | None = None
        self.resumes: Fraction | None = self.every  # end of the training or of the copy
        self.slots = plan.slots()
        self.free = set(range(len(self.slots)))
        self.used = [0] * len(plan.memories)
        self.snapshots: list[_Job] = []
        self.writing: _Transfer | None = None
        self.to_copy: list[_Job] = []
        self.to_read_back: list[_Job] = []
        self.draining: _Transfer | None = None

    def begin_work(self) -> None:
        """Give work to everything that is idle and need not wait."""
        self._supersede()
        if self.saving is not None and self.resumes is None:
            self._begin_copy(self.saving)
        if self.writing is None and self.snapshots:
            job = self.snapshots.pop(self._next_to_write())
            self.writing = _Transfer(job, Fraction(self.plan.size_bytes))
        if self.draining is None:
            self._begin_drain()

    def next_event(self) -> Fraction | None:
        """Return the time of the next event; None at the end."""
        times = [self.resumes] if self.resumes is not None else []
        if self.writing is not None:
            times.append(self.now + self.writing.left / self.plan.local_rate)
        if self.draining is not None and not self._yields():
            assert self.plan.remote_rate is not None
            times.append(self.now + self.draining.left / self.plan.remote_rate)
        oldest = self._oldest_waiting()
        if oldest is not None:
            times += [oldest + self.max_lag / 2, oldest + self.max_lag]
        later = [one for one in times if one > self.now]
        return min(later) if later else None

    def advance(self, to: Fraction) -> None:
        """Move on to the time `to`, and end what ends then."""
        passed, yields = to - self.now, self._yields()
        self.now = to
        if self.writing is not None:
            self.writing.left -= passed * self.plan.local_rate
        if self.draining is not None and not yields:
            assert self.plan.remote_rate is not None
            self.draining.left -= passed * self.plan.remote_rate
        if self.writing is not None and self.writing.left <= 0:
            self._written(self.writing.job)
        if self.draining is not None and self.draining.left <= 0:
            self._drained(self.draining)
        if self.resumes == to:
            self.resumes = None
            if self.saving is None:
                self._call()
            else:
                self._copied(self.saving)

    # The trainer.

    def _call(self) -> None:
        trained = self.every * (len(self.jobs) + 1)
        self.saving = _Job(number=len(self.jobs) + 1, at=self.now, trained=trained)
        self.jobs.append(self.saving)

    def _begin_copy(self, job: _Job) -> None:
        """Begin the copy of a snapshot, or leave the trainer waiting."""
        plan = self.plan
        if job.called is None:
            if plan.on_lag == "wait" and self._lag_exceeded():
                return
            job.lag_wait, job.called = self.now - job.at, self.now
        if not self.slots:
            self._begin_synchronous(job)
            return
        if not self.free and plan.on_full == "supersede" and self.snapshots:
            self._drop(self.snapshots.pop(0))
        if not self.free:
            if plan.on_full == "skip":
                job.end = "skipped"
                self._train_on()
            return
        job.memory_wait = self.now - job.called
        self.free.remove(slot := min(self.free))
        job.slot, job.parts = slot, self.slots[slot]
        for number, memory in enumerate(plan.memories):
            self.used[number] += job.parts[number]
            job.copy += Fraction(job.parts[number], memory.rate_bytes_per_s)
        job.used = tuple(self.used)
        self.resumes = self.now + job.copy

    def _begin_synchronous(self, job: _Job) -> None:
        job.copy = Fraction(self.plan.size_bytes, self.plan.local_rate)
        self.resumes = self.now + job.copy

    def _copied(self, job: _Job) -> None:
        if not self.slots:
            self._durable(job)
        else:
            self.snapshots.append(job)
        self._train_on()

    def _train_on(self) -> None:
        self.saving = None
        if len(self.jobs) < self.plan.saves:
            self.resumes = self.now + self.every

    # The local tier.

    def _next_to_write(self) -> int:
        """Return the index of the snapshot to write next: see `spill`."""
        if self.plan.every_save:
            return 0
        memories = list(zip(self.plan.memories, self.used, strict=True))
        free = {one.name: (one.size_bytes - used) / one.size_bytes for one, used in memories}
        return next_to_write(
            [
                {one.name: part for (one, _), part in zip(memories, job.parts, strict=True) if part}
                for job in self.snapshots
            ],
            free,
        )

    def _drop(self, job: _Job) -> None:
        job.end = "superseded"
        self._free(job)

    def _free(self, job: _Job) -> None:
        assert job.slot is not None
        self.free.add(job.slot)
        for number, part in enumerate(job.parts):
            self.used[number] -= part

    def _written(self, job: _Job) -> None:
        self.writing = None
        self._free(job)
        self._durable(job)

    def _durable(self, job: _Job) -> None:
        job.local = self.now
        if self.plan.remote_rate is None:
            return
        room, size = self.plan.max_lag_bytes, self.plan.size_bytes
        waiting = self._waiting()
        full = room is not None and (len(waiting) + 1) * size > room
        if self.plan.on_lag == "skip" and waiting and (full or self._lag_exceeded()):
            return
        self.to_copy.append(job)

    # The remote tier.

    def _waiting(self) -> list[_Job]:
        """Return the checkpoints that are not in the remote tier yet, the oldest first."""
        now = [self.draining.job] if self.draining and not self.draining.reads_back else []
        return sorted([*now, *self.to_copy], key=lambda one: one.number)

    def _oldest_waiting(self) -> Fraction | None:
        return min((one.local for one in self._waiting() if one.local is not None), default=None)

    def _lag_exceeded(self, divisor: int = 1) -> bool:
        oldest, room = self._oldest_waiting(), self.plan.max_lag_bytes
        if oldest is None:
            return False
        if (self.now - oldest) * divisor >= self.max_lag:
            return True
        waits = len(self._waiting()) * self.plan.size_bytes
        return room is not None and waits > room // divisor

    def _supersede(self) -> None:
        """Give up copies past the limit of the lag. A copy that has begun goes on."""
        if self.plan.on_lag != "supersede":
            return
        waiting, room = self._waiting()[::-1], self.plan.max_lag_bytes
        for place, job in enumerate(waiting[1:], 2):
            assert job.local is not None
            old = self.now - job.local >= self.max_lag
            full = room is not None and place * self.plan.size_bytes > room
            if (old or full) and job in self.to_copy:
                self.to_copy.remove(job)

    def _begin_drain(self) -> None:
        size = Fraction(self.plan.size_bytes)
        place = 0 if self.plan.every_save else -1
        if self.to_copy:
            self.draining = _Transfer(self.to_copy.pop(place), size)
        elif self.to_read_back:
            self.draining = _Transfer(self.to_read_back.pop(place), size, reads_back=True)

    def _yields(self) -> bool:
        """Whether copies pause, because a snapshot is being written."""
        return self._is_writing() and not self._lag_exceeded(2)

    def _is_writing(self) -> bool:
        synchronous = not self.slots and self.saving is not None
        return self.writing is not None or (synchronous and self.resumes is not None)

    def _drained(self, done: _Transfer) -> None:
        self.draining = None
        if done.reads_back:
            return
        done.job.remote = self.now
        self.to_read_back.append(done.job)

    # The result.

    def prediction(self) -> Prediction:
        """Return the result. All saves have ended."""
        local = [(one.local, one.trained) for one in self.jobs if one.local is not None]
        remote = [(one.remote, one.trained) for one in self.jobs if one.remote is not None]
        lost = self._most_lost(remote) if self.plan.remote_rate is not None else None
        return Prediction(
            plan=self.plan,
            saves=tuple(_planned(one) for one in self.jobs),
            ended_s=float(self.now),
            lost_node_s=float(self._most_lost(local)),
            lost_local_s=None if lost is None else float(lost),
        )

    def _trained_at(self, when: Fraction) -> Fraction:
        """Return the training that was done at a time."""
        for job in reversed(self.jobs):
            if when >= job.at:
                after = when - job.at - job.lag_wait - job.memory_wait - job.copy
                last = job is self.jobs[-1]
                return job.trained + (Fraction(0) if last else max(Fraction(0), after))
        return when

    def _most_lost(self, durable: list[tuple[Fraction, Fraction]]) -> Fraction:
        """Return the most training between the newest durable checkpoint and a moment."""
        end = self.jobs[-1].at
        newest, most = Fraction(0), Fraction(0)
        for when, trained in [*sorted(durable), (end, Fraction(0))]:
            if when > end:
                continue
            most = max(most, self._trained_at(when) - newest)
            newest = max(newest, trained)
        return max(most, self._trained_at(end) - newest)


def _planned(job: _Job) -> PlannedSave:
    return PlannedSave(
        number=job.number,
        at_s=float(job.at),
        trained_s=float(job.trained),
        lag_wait_s=float(job.lag_wait),
        memory_wait_s=float(job.memory_wait),
        copy_s=float(job.copy),
        end=job.end,
        local_s=None if job.local is None else float(job.local),
        remote_s=None if job.remote is None else float(job.remote),
        used=job.used,
    )
