"""SimulatedDrain: the copies to the remote tier in a simulation."""

from __future__ import annotations

from bisect import insort
from fractions import Fraction

from iobench.tiers.observed import REMOTE, ObservedRates
from iobench.tiers.pace import pause_after
from iobench.tiers.plan import TiersPlan
from iobench.tiers.simulated import SimulatedSave, SimulatedTransfer, exact

__all__ = ["SimulatedDrain"]

_MEAN_PAUSE = Fraction(3, 4)
"""A drain waits for 0.5 to 1 of each pause, at random."""


class SimulatedDrain:
    """What a Drain does between two events of a simulation.

    `rate` is that of the remote tier now, `open` whether it answered when it was last asked.
    """

    def __init__(self, plan: TiersPlan, rates: ObservedRates) -> None:
        self.plan, self.rates = plan, rates
        self.rate = plan.remote_rate or 0
        self.timeout = exact(plan.timeout_s)
        self.open = True
        self.untidy = False
        self._changes = [(exact(one.at_s), one.rate_bytes_per_s) for one in plan.remote_changes]
        self._max_lag = exact(plan.max_lag_s)
        self._to_copy: list[SimulatedSave] = []  # the last saved one is last
        self._to_read_back: list[SimulatedSave] = []
        self._there: set[int] = set()
        self._now: SimulatedTransfer | None = None
        self._in_flight = Fraction(0)  # bytes of it that go on while a snapshot is written
        self._failed_in_a_row = 0
        self._pauses_until: Fraction | None = None

    def saved(self, job: SimulatedSave, now: Fraction) -> None:
        """Queue a save that is durable in the local tier, unless it is skipped."""
        if self.plan.remote_rate is None:
            return
        room, size = self.plan.max_lag_bytes, self.plan.size_bytes
        waiting = self._waiting()
        full = room is not None and (waiting + 1) * size > room
        if self.plan.on_lag == "skip" and waiting and (full or self.lag_exceeded(now)):
            return
        self._to_copy.append(job)

    def sent_directly(self, job: SimulatedSave) -> None:
        """Record a save that was written to the remote tier."""
        self._there.add(job.number)

    def has_work(self) -> bool:
        """Whether there is a copy to make or to read back, and the remote tier will take it."""
        answers = self.rate or self._changes
        return bool(answers and (self._now or self._to_copy or self._to_read_back))

    def begin_work(self, now: Fraction) -> None:
        """Begin the next transfer, if there is none."""
        self._supersede(now)
        if self._now is not None or self._pauses_until is not None:
            return
        self._give_up_unkept()
        self._in_flight = Fraction(0)
        place = 0 if self.plan.every_save else -1
        size, wait = Fraction(self.plan.size_bytes), exact(self.plan.remote_latency_s)
        if not self.open or self.untidy:
            self._now = SimulatedTransfer(None, REMOTE, "look", Fraction(1))
        elif self._to_copy:
            job = self._to_copy.pop(place)
            self._now = SimulatedTransfer(job, REMOTE, "copy", size - job.sent, wait)
        elif self._to_read_back:
            job = self._to_read_back.pop(place)
            self._now = SimulatedTransfer(job, REMOTE, "read back", size, wait)

    def next_events(self, now: Fraction, writing: bool) -> list[Fraction]:
        """Return when something may happen; `writing`: a snapshot is being written."""
        times = [at for at, _ in self._changes[:1]]
        if self._pauses_until is not None:
            times.append(self._pauses_until)
        if self._now is not None and not self._yields(now, writing):
            times.append(self._now.next_event(now, self._rate(), self.timeout))
            if writing and self._in_flight > 0 and self.rate:
                times.append(now + self._now.wait + self._in_flight / self.rate)
        oldest = self._oldest_waiting()
        if oldest is not None:
            times += [oldest + self._max_lag / 2, oldest + self._max_lag]
        return times

    def advance(self, to: Fraction, passed: Fraction, writing: bool) -> None:
        """Move on to the time `to`."""
        if self._now is None or self._yields(to - passed, writing):
            return
        before = self._now.left
        self._now.advance(passed, self._rate())
        if writing:
            self._in_flight -= before - self._now.left
        elif self._now.kind == "copy":
            self._in_flight = Fraction(self.plan.in_flight_bytes)

    def end_work(self, now: Fraction) -> None:
        """End what ends now, and change the rate if it changes now."""
        done = self._now
        if done is not None and done.ended():
            self._now = None
            self._ended(done, now)
        elif done is not None and done.failed(now, self.timeout):
            self._now = None
            self._failed(done, now)
        if self._pauses_until is not None and now >= self._pauses_until:
            self._pauses_until = None
        while self._changes and self._changes[0][0] <= now:
            self.rate = self._changes.pop(0)[1]

    def _rate(self) -> int:
        """Return the rate of the transfer."""
        own = self.plan.read_back_rate
        reads = self._now is not None and self._now.kind == "read back"
        return own if own and reads and self.rate else self.rate

    def lag_exceeded(self, now: Fraction, divisor: int = 1) -> bool:
        """Return whether the limit of the lag, divided by `divisor`, is exceeded."""
        oldest, room = self._oldest_waiting(), self.plan.max_lag_bytes
        if oldest is None:
            return False
        if (now - oldest) * divisor >= self._max_lag:
            return True
        waits = self._waiting() * self.plan.size_bytes
        return room is not None and waits > room // divisor

    def holds_saves(self, now: Fraction) -> bool:
        """Return whether saves wait for the lag. They do not wait for a tier that fails."""
        return not self._failed_in_a_row and self.lag_exceeded(now)

    def _ended(self, done: SimulatedTransfer, now: Fraction) -> None:
        job = done.job
        if done.kind == "look":
            self.open, self.untidy = True, False
            return
        self._failed_in_a_row = 0
        if done.kind == "copy":
            assert job is not None
            job.remote = now
            self._there.add(job.number)
            self._to_read_back.append(job)
            sent = self.plan.size_bytes - job.sent
            self.rates.add(REMOTE, round(sent), float(done.spent))

    def _failed(self, done: SimulatedTransfer, now: Fraction) -> None:
        """Try again after a pause. The copy goes on from where it was."""
        job = done.job
        if job is not None:
            if done.kind == "copy":
                job.sent = self.plan.size_bytes - done.left
            queue = self._to_copy if done.kind == "copy" else self._to_read_back
            insort(queue, job, key=_since)
        self._failed_in_a_row += 1
        self.open = False
        self.rates.add(REMOTE, 0, 0.0, ok=False)
        self._pauses_until = now + exact(pause_after(self._failed_in_a_row)) * _MEAN_PAUSE

    def _waiting(self) -> int:
        """Return how many checkpoints are not in the remote tier yet."""
        return len(self._to_copy) + (self._copying() is not None)

    def _copying(self) -> SimulatedSave | None:
        return self._now.job if self._now is not None and self._now.kind == "copy" else None

    def _oldest_waiting(self) -> Fraction | None:
        """Return since when the oldest one waits."""
        some = (*self._to_copy[:1], self._copying())
        return min((one.local for one in some if one and one.local is not None), default=None)

    def _supersede(self, now: Fraction) -> None:
        """Give up copies past the limit of the lag. A copy that has begun goes on."""
        if self.plan.on_lag != "supersede":
            return
        room, copying = self.plan.max_lag_bytes, self._copying()
        while self._to_copy:
            oldest = self._to_copy[0]
            place = len(self._to_copy) + bool(copying and _since(copying) > _since(oldest))
            old = now - _since(oldest) >= self._max_lag
            full = room is not None and place * self.plan.size_bytes > room
            if place == 1 or not (old or full):
                return
            self._to_copy.pop(0)

    def _give_up_unkept(self) -> None:
        """Give up copies that the retention of the remote tier would not keep."""
        keep = self.plan.keep_last
        if keep is None:
            return
        kept = set(sorted(self._there | {one.number for one in self._to_copy})[-keep:])
        self._there &= kept
        self._to_read_back = [one for one in self._to_read_back if one.number in kept]
        if not self.plan.every_save:
            kept |= {one.number for one in self._to_copy[-1:]}
            self._to_copy = [one for one in self._to_copy if one.number in kept]

    def _yields(self, now: Fraction, writing: bool) -> bool:
        """Whether copies pause, because a snapshot is being written."""
        looks = self._now is not None and self._now.kind == "look"
        return writing and not looks and self._in_flight <= 0 and not self.lag_exceeded(now, 2)


def _since(job: SimulatedSave) -> Fraction:
    """Return since when it waits for its copy."""
    assert job.local is not None
    return job.local
