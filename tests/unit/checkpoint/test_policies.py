"""The checkpoints that a policy keeps, and when one is due, on a fake clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench import Auto, Every, KeepAll, KeepEvery, KeepLast
from iobench.checkpoint.save import Save, Status
from iobench.errors import OptionError

_HOURLY = {step: step * 3600.0 for step in range(20)}


def test_what_is_kept() -> None:
    """The newest ones, by step; or the oldest and then one per period, where the newest is never
    removed. `|` keeps the checkpoints of both policies."""
    assert KeepLast(3).obsolete(_HOURLY) == list(range(17))
    assert KeepLast(30).obsolete(_HOURLY) == []
    assert KeepLast(1).obsolete({}) == []
    assert KeepEvery(hours=6).kept(_HOURLY) == {0, 6, 12, 18}
    assert 19 not in KeepEvery(hours=6).obsolete(_HOURLY)
    assert KeepEvery(steps=8).kept(_HOURLY) == {0, 8, 16}
    assert (KeepLast(2) | KeepEvery(steps=10)).kept(_HOURLY) == {0, 10, 18, 19}
    assert (KeepLast(1) | KeepAll()).obsolete(_HOURLY) == []


def test_training_that_went_back() -> None:
    """The newest is the last saved one, whatever its step; abandoned steps are the oldest. If a
    clock goes back, kept steps stay kept, and counting continues from the new time."""
    gone_back = {100: 1.0, 200: 2.0, 300: 3.0, 210: 4.0}
    assert KeepLast(2).obsolete(gone_back) == [300, 100]
    assert KeepLast(4).obsolete(gone_back) == []
    assert KeepEvery(hours=2 / 3600).kept(gone_back) == {100, 300}
    assert KeepEvery(steps=100).kept(gone_back) == {100, 200, 300, 210}
    assert KeepEvery(steps=1000).obsolete(gone_back) == [300, 200]
    before = {0: 0.0, 120: 1.0, 230: 2.0}
    assert KeepEvery(steps=100).kept({**before, 100: 3.0}) == {0, 120, 230, 100}
    hours = [0, 0.5, 1, 2, -3, -2.5, -2, 2.1]
    created_s = {step: at * 3600.0 for step, at in enumerate(hours)}
    assert KeepEvery(hours=1).kept(created_s) == {0, 2, 3, 4, 6, 7}


@given(st.lists(st.integers(-60, 50), max_size=30), st.integers(1, 5), st.integers(1, 90))
def test_removing_at_once_or_bit_by_bit(gaps: list[int], count: int, period: int) -> None:
    """The result depends neither on when retention ran, nor on a clock that goes back."""
    every = KeepEvery(hours=period / 3600)
    policy = KeepLast(count) | every
    everything: dict[int, float] = {}
    held: dict[int, float] = {}
    kept: set[int] = set()
    at = 0.0
    for step, gap in enumerate(gaps):
        at += gap
        everything[step] = held[step] = at
        for gone in policy.obsolete(held):
            del held[gone]
        kept |= every.kept(held)
        assert kept <= held.keys()
    assert set(held) == policy.kept(everything)


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(0),
        lambda: KeepLast("3"),
        lambda: KeepLast(2.5),
        lambda: KeepEvery(),
        lambda: KeepEvery(hours=-1),
        lambda: KeepEvery(hours="6"),
    ],
)
def test_nonsense(make) -> None:
    """A policy that would keep nothing, or that is not a policy, is refused."""
    with pytest.raises(OptionError):
        make()
    with pytest.raises(TypeError, match="unsupported operand"):
        KeepLast(3) | 5


def _save(step: int, stall_s: float = 0.0, persist_s: float = 0.0) -> Save:
    return Save(step=step, status="committed", created_s=0, stall_s=stall_s, persist_s=persist_s)


def _due(schedule: Every, steps: range) -> list[int]:
    found = []
    for step in steps:
        if schedule.due(step):
            found.append(step)
            schedule.started(_save(step))
    return found


def test_every() -> None:
    """After so many steps, wherever counting began. An extra save counts; a failed one is due
    again."""
    assert _due(Every(20), range(100)) == [19, 39, 59, 79, 99]
    assert _due(Every(20), range(105, 150)) == [124, 144]
    assert _due(Every(1), range(3)) == [0, 1, 2]
    schedule = Every(10)
    assert not schedule.due(0)
    schedule.started(_save(5))
    assert [schedule.due(step) for step in (14, 15, 16)] == [False, True, True]


class _Training:
    """Steps of `step_s`, longer by `slow` while a checkpoint is written for `persist_s`."""

    def __init__(self, schedule: Auto, step_s: float, stall_s: float, persist_s: float) -> None:
        self.now_s = 0.0
        self.schedule, self.step_s = schedule, step_s
        self.stall_s, self.persist_s, self.slow = stall_s, persist_s, 1.0
        self.pending: tuple[float, Save] | None = None
        self.saved: list[int] = []
        self.outcome: Status = "committed"

    def run(self, steps: int) -> None:
        for step in range(steps):
            writing = self.pending is not None
            self.now_s += self.step_s * (self.slow if writing else 1)
            if self.pending and self.pending[0] <= self.now_s:
                self.pending[1].status = self.outcome
                self.pending[1].persist_s = self.persist_s  # of this clock
                self.pending = None
            if self.schedule.due(step):
                self.now_s += self.stall_s
                save = _save(step, self.stall_s, self.persist_s)
                save.status = "writing"
                self.schedule.started(save)
                self.pending = self.now_s + self.persist_s, save
                self.saved.append(step)


def _training(**times: float) -> _Training:
    training: list[_Training] = []
    schedule = Auto(0.05, warmup_steps=5, clock=lambda: training[0].now_s)
    training.append(_Training(schedule, **times))
    return training[0]


@pytest.mark.parametrize(
    ("stall_s", "persist_s", "slow", "intervals"),
    [
        (0.5, 0.1, 1.0, {10}),  # the shortest at which the stall is in the budget: 0.5 / (0.05 * 1)
        (0.0, 7.5, 1.0, {8}),  # a checkpoint is on storage before the next one begins
        (0.0, 4.0, 1.25, {20, 21, 22}),  # 4 steps of each interval lose 1 s: 20 are needed
    ],
)
def test_auto(stall_s: float, persist_s: float, slow: float, intervals: set[int]) -> None:
    """By the stall, by storage, and by steps that are slower than the budget allows: then the
    interval grows, by 2 each time."""
    training = _training(step_s=1.0, stall_s=stall_s, persist_s=persist_s)
    training.slow = slow
    training.run(60 if slow == 1 else 400)
    assert training.schedule.interval in intervals
    assert training.saved[0] == 5  # five steps measured before it
    gaps = {b - a for a, b in zip(training.saved, training.saved[1:], strict=False)}
    assert len(training.saved) > 4
    assert slow > 1 or gaps == intervals


def test_auto_tries_again() -> None:
    """While the first checkpoint fails there is no measurement; the next step tries again."""
    training = _training(step_s=1.0, stall_s=0.5, persist_s=2.0)
    training.outcome = "failed"
    training.run(20)
    assert training.schedule.interval is None
    assert len(training.saved) > 2
    training.outcome = "committed"
    training.run(20)
    assert training.schedule.interval == 10


def test_nonsense_schedules() -> None:
    """Invalid values are refused."""
    for schedule, options in (
        *((Every, {"steps": steps}) for steps in (0, "5")),
        *((Auto, {"budget": share}) for share in (0, 1.5)),
        (Auto, {"budget": 0.1, "warmup_steps": 1}),
    ):
        with pytest.raises(OptionError):
            schedule(**options)
