"""simulate: what a TiersPlan does, event by event; a pure function with exact arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction

from iobench.tiers.observed import LOCAL, REMOTE, ObservedRates
from iobench.tiers.placement import TierRoom, choose, direct_limit_s
from iobench.tiers.plan import Prediction, TiersPlan
from iobench.tiers.probe import probe_bytes
from iobench.tiers.simulated import SimulatedSave, SimulatedTransfer, exact
from iobench.tiers.simulated_drain import SimulatedDrain
from iobench.tiers.spill import next_to_write

__all__ = ["simulate"]

_MOST_EVENTS = 1_000_000


def simulate(plan: TiersPlan) -> Prediction:
    """Return what happens to each save of `plan`.

    The rules are those of a Checkpointer with memory tiers. A save waits for memory, then for its
    copy. One snapshot is written at a time: with `every_save` the oldest, else the newest in the
    scarcest memory, to the tier that the placement chooses. Copies to the remote tier pause while a
    snapshot is written, until the lag is half of its limit. Each copy is read back when no copy
    waits. Times are fractions, so equal plans give equal results to the last digit.
    """
    run = _Run(plan)
    for _ in range(_MOST_EVENTS):
        run.begin_work()
        after = run.next_event()
        if after is None:
            return run.prediction()
        run.advance(after)
    raise AssertionError("the simulation does not end")


class _Run:
    """The state between two events."""

    def __init__(self, plan: TiersPlan) -> None:
        self.plan = plan
        self.now = Fraction(0)
        self.every = exact(plan.every_s)
        self.jobs: list[SimulatedSave] = []
        self.saving: SimulatedSave | None = None
        self.resumes: Fraction | None = self.every  # end of the training or of the copy
        self.slots = plan.slots()
        self.free = set(range(len(self.slots)))
        self.used = [0] * len(plan.memories)
        self.snapshots: list[SimulatedSave] = []
        self.writing: SimulatedTransfer | None = None
        self.to_probe = False
        self.rates = ObservedRates(lambda: float(self.now))
        self.drain = SimulatedDrain(plan, self.rates)

    def begin_work(self) -> None:
        """Give work to everything that is idle and need not wait."""
        if self.saving is not None and self.resumes is None and not self._is_synchronous():
            self._begin_copy(self.saving)
        if self.writing is None and self.snapshots:
            self._begin_write(self.snapshots.pop(self._next_to_write()))
        self.drain.begin_work(self.now)

    def next_event(self) -> Fraction | None:
        """Return the time of the next event; None at the end."""
        times = [self.resumes] if self.resumes is not None else []
        if self.writing is not None:
            times.append(self.writing.next_event(self.now, self._rate(), self.drain.timeout))
        times += self.drain.next_events(self.now, self._is_writing())
        later = [one for one in times if one > self.now]
        return min(later) if later and self._goes_on() else None

    def advance(self, to: Fraction) -> None:
        """Move on to the time `to`, and end what ends then."""
        passed = to - self.now
        if self.writing is not None:
            self.writing.advance(passed, self._rate())
        self.drain.advance(to, passed, self._is_writing())
        self.now = to
        if self.writing is not None:
            self._look_at(self.writing)
        self.drain.end_work(to)
        if self.resumes == to:
            self.resumes = None
            if self.saving is None:
                self._call()
            else:
                self._copied(self.saving)

    def _goes_on(self) -> bool:
        """Whether anything is left to do. Rates that change later are no work."""
        return (
            self.resumes is not None
            or self.saving is not None
            or self.writing is not None
            or self.drain.has_work()
        )

    # The trainer.

    def _call(self) -> None:
        trained = self.every * (len(self.jobs) + 1)
        self.saving = SimulatedSave(number=len(self.jobs) + 1, at=self.now, trained=trained)
        self.jobs.append(self.saving)

    def _begin_copy(self, job: SimulatedSave) -> None:
        """Begin the copy of a snapshot, or leave the trainer waiting."""
        plan = self.plan
        if job.called is None:
            if plan.on_lag == "wait" and self.drain.holds_saves(self.now):
                return
            job.lag_wait, job.called = self.now - job.at, self.now
        if not self.slots:
            if self.writing is None:  # a probe may be under way
                self._begin_write(job)
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

    def _copied(self, job: SimulatedSave) -> None:
        self.snapshots.append(job)
        self._train_on()

    def _train_on(self) -> None:
        self.saving = None
        if len(self.jobs) < self.plan.saves:
            self.resumes = self.now + self.every

    # The writes.

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

    def _begin_write(self, job: SimulatedSave) -> None:
        """Write to the tier that the placement chooses."""
        placement, size = self.plan.placement, self.plan.size_bytes
        if placement is None or self.plan.remote_rate is None:
            self._begin_local(job)
            return
        rooms = [TierRoom(name=one) for one in (LOCAL, REMOTE) if one == LOCAL or self.drain.open]
        found = choose(
            self.rates.history(), rooms, placement, size_bytes=size, now_s=float(self.now)
        )
        self.rates.chosen(found.tier)
        if found.tier == LOCAL:
            self._begin_local(job)
            return
        self.to_probe = found.probe == LOCAL
        limit_s = direct_limit_s(placement, found, size)
        job.tier = REMOTE
        self.writing = SimulatedTransfer(
            job=job,
            tier=REMOTE,
            kind="save",
            left=Fraction(size),
            wait=exact(self.plan.remote_latency_s),
            until=None if limit_s is None else self.now + exact(limit_s),
        )

    def _begin_local(self, job: SimulatedSave) -> None:
        job.tier = LOCAL
        self.writing = SimulatedTransfer(
            job=job,
            tier=LOCAL,
            kind="save",
            left=Fraction(self.plan.size_bytes),
            wait=exact(self.plan.local_latency_s),
        )

    def _rate(self) -> int:
        """Return the rate of the tier that is written to."""
        local = self.writing is None or self.writing.tier == LOCAL
        return self.plan.local_rate if local else self.drain.rate

    def _look_at(self, writing: SimulatedTransfer) -> None:
        """End the write if it is complete or has failed."""
        job = writing.job
        if writing.ended():
            self.writing = None
            size = self.plan.size_bytes if job else probe_bytes(self.plan.size_bytes)
            self.rates.add(writing.tier, size, float(writing.spent))
            if job is not None:
                self._written(job)
        elif job is not None and writing.failed(self.now, self.drain.timeout):
            self.rates.add(REMOTE, self.plan.size_bytes, float(writing.spent), ok=False)
            self.drain.untidy = True
            self._begin_local(job)

    def _written(self, job: SimulatedSave) -> None:
        if job is self.saving:
            assert job.called is not None
            job.copy = self.now - job.called
            self._train_on()
        else:
            self._free(job)
        if job.tier == LOCAL:
            job.local = self.now
            self.drain.saved(job, self.now)
            return
        job.remote = self.now
        self.drain.sent_directly(job)
        if self.to_probe:
            size = Fraction(probe_bytes(self.plan.size_bytes))
            self.writing = SimulatedTransfer(job=None, tier=LOCAL, kind="probe", left=size)

    def _drop(self, job: SimulatedSave) -> None:
        job.end = "superseded"
        self._free(job)

    def _free(self, job: SimulatedSave) -> None:
        assert job.slot is not None
        self.free.add(job.slot)
        for number, part in enumerate(job.parts):
            self.used[number] -= part

    def _is_writing(self) -> bool:
        return self.writing is not None and self.writing.job is not None

    def _is_synchronous(self) -> bool:
        """Whether the trainer waits for the write."""
        return self.writing is not None and self.writing.job is self.saving

    # The result.

    def prediction(self) -> Prediction:
        """Return the result. All saves have ended."""
        remote = [(one.remote, one.trained) for one in self.jobs if one.remote is not None]
        local = [(one.local, one.trained) for one in self.jobs if one.local is not None]
        lost = self._most_lost(remote) if self.plan.remote_rate is not None else None
        return Prediction(
            plan=self.plan,
            saves=tuple(one.planned() for one in self.jobs),
            ended_s=float(self.now),
            lost_node_s=float(self._most_lost([*local, *remote])),
            lost_local_s=None if lost is None else float(lost),
        )

    def _trained_at(self, when: Fraction) -> Fraction:
        """Return the training that was done at a time."""
        place = bisect_right(self.jobs, when, key=lambda one: one.at)
        if not place:
            return when
        job = self.jobs[place - 1]
        after = when - job.at - job.lag_wait - job.memory_wait - job.copy
        return job.trained + (Fraction(0) if job is self.jobs[-1] else max(Fraction(0), after))

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
