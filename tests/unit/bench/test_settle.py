"""Waiting for a quiet device, on a fake clock."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from iobench.bench.targets import settle as module
from iobench.bench.targets.settle import Patience, settled


class Clock:
    """Time passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def device(busy_until: float, clock: Clock) -> Any:
    """A monitor whose counter moves until the clock shows `busy_until`; `was_read` is an event."""
    was_read = threading.Event()

    def read() -> float:
        now = min(clock.now, busy_until)
        was_read.set()
        return now

    return SimpleNamespace(read=read, was_read=was_read)


def settle(directory: Path, monitor: Any) -> None:
    """Wait, with nothing to prepare."""
    with settled(directory, monitor):
        pass


def test_no_device_to_ask(tmp_path: Path, clock: Clock) -> None:
    """Without counters it waits for one interval."""
    settle(tmp_path, SimpleNamespace(read=lambda: None))
    assert clock.sleeps == 1


def test_replaced_files_are_freed_first(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their discards would disturb the next sample. Then dirty pages are written, and the device is
    watched."""
    order: list[str] = []
    monkeypatch.setattr(module.deferred_free, "wait", lambda: order.append("freed"))
    monkeypatch.setattr(module.linux, "sync_file_system", lambda _: order.append("synced"))
    settle(tmp_path, SimpleNamespace(read=lambda: order.append("read")))
    assert order == ["freed", "synced", "read", "read", "read"]


@pytest.mark.parametrize(
    ("busy_until", "prepared_at", "ended_at"),
    [(0.0, 0.5, 0.5), (0.0, 0.04, 0.1), (0.45, 0.5, 0.6), (0.7, 0.5, 0.8), (1e9, 4.0, 4.0)],
    ids=["idle", "idle_but_brief", "busy_before_its_end", "busy_after_it", "busy_for_ever"],
)
def test_time_spent_in_the_block_counts(
    tmp_path: Path, clock: Clock, busy_until: float, prepared_at: float, ended_at: float
) -> None:
    """A device that rested meanwhile is not waited for; one that moved must rest afterwards."""
    monitor = device(busy_until, clock)
    with settled(tmp_path, monitor):
        assert monitor.was_read.wait(60)  # the sync has ended
        clock.now = prepared_at
    assert clock.now == pytest.approx(ended_at)


def test_the_block_runs_during_the_sync(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is watched after both; an error of the sync is raised after the block."""
    ended, order = threading.Event(), []

    def sync(_fd: int) -> None:
        assert ended.wait(60)
        order.append("synced")

    monkeypatch.setattr(module.linux, "sync_file_system", sync)
    with settled(tmp_path, device(0.0, clock)):
        order.append("block")
        ended.set()
    assert (order, clock.sleeps) == (["block", "synced"], 1)
    with pytest.raises(FileNotFoundError), settled(tmp_path / "none", device(0.0, clock)):
        order.append("next")
    assert order[-1] == "next"


def test_patience_shrinks_with_waits_that_are_too_short(tmp_path: Path, clock: Clock) -> None:
    """After a wait that was too short the next is a quarter of it, at least 3/8 s, with a note.

    A wait that finds the device idle doubles the time again, and has no note.
    """
    patience, waits, notes = Patience(), [], []
    for busy in (True,) * 6 + (False,) * 4 + (True, False):
        began = clock.now
        with settled(tmp_path, device(1e9 if busy else 0.0, clock), patience):
            pass
        waits.append(round(clock.now - began, 3))
        notes.append(patience.notes)
    assert waits == [3.0, 0.75, 0.375, 0.375, 0.375, 0.375, 0.1, 0.1, 0.1, 0.1, 3.0, 0.1]
    said = [bool(note) for note in notes]
    assert said == [False, True, True, True, True, True, *(False,) * 6]
    assert len({*notes}) == 2


def test_an_error_in_the_block_ends_the_wait(tmp_path: Path, clock: Clock) -> None:
    """What fails to prepare needs no idle device."""
    with pytest.raises(ZeroDivisionError), settled(tmp_path, device(1e9, clock)):
        _ = 1 / 0
    assert clock.sleeps == 0


def test_without_patience_only_the_sync_is_waited_for(tmp_path: Path, clock: Clock) -> None:
    """The next operation has no note: this is asked for, and nothing is wrong."""
    none = Patience(0.0)
    for _ in range(2):
        with settled(tmp_path, device(9.0, clock), none):
            clock.now += 0.01
        assert (clock.sleeps, none.seconds, none.notes) == (0, 0.0, ())
