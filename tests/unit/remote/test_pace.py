"""DrainPace: the rate of all threads together, saves first, and the end."""

from __future__ import annotations

import pytest

from iobench.remote.pace import DrainPace, DrainStoppedError


class _Clock:
    """Time that passes by waits alone."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        return False


def _pace(rate: int | None, busy: list[bool], monkeypatch: pytest.MonkeyPatch) -> DrainPace:
    clock = _Clock()
    pace = DrainPace(rate, lambda: busy.pop(0) if busy else False, clock=clock)
    monkeypatch.setattr(pace.stop, "wait", clock.wait)
    return pace


def test_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block begins when it and those before it would be through at the rate."""
    pace = _pace(1000, [], monkeypatch)
    began = []
    pace.begin()
    for size in (500, 2000, 100, 100):
        pace.wait(size)
        began.append(pace._clock() - 100.0)
    assert began == pytest.approx([0.5, 2.5, 2.6, 2.7])


def test_time_of_the_transfer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as slow as the rate need not wait; time without a copy gives nothing."""
    pace = _pace(1000, [], monkeypatch)
    pace.begin()
    began = []
    for _ in range(3):
        pace.wait(500)
        began.append(pace._clock() - 100.0)
        pace.stop.wait(0.5)  # the transfer
    assert began == pytest.approx([0.5, 1.0, 1.5])
    pace.stop.wait(100.0)
    pace.begin()
    begin_s = pace._clock()
    pace.wait(500)
    assert pace._clock() - begin_s == pytest.approx(0.5)


def test_a_save_in_the_middle_of_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy pauses: its time is that without the save, and that of the save."""
    pace = _pace(1000, [False, True, True, True], monkeypatch)
    pace.begin()
    pace.wait(500)
    assert pace._clock() - 100.0 == pytest.approx(0.56)
    assert pace.yielded_s == pytest.approx(0.06)
    pace.wait(500)
    assert pace._clock() - 100.0 == pytest.approx(1.06)


def test_a_pause_is_no_pause_while_a_block_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a copy without its pauses has all of the time in which it moved something."""
    pace = _pace(None, [False, True, True, False, True], monkeypatch)
    with pace.moving(500), pace.moving(500):  # the second one waits during the first one
        pass
    assert pace.yielded_s == 0.0
    with pace.moving(500):
        pass
    assert pace.yielded_s == pytest.approx(0.02)


def test_no_block_begins_while_a_save_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the wait is counted: such a copy says nothing about the rate."""
    pace = _pace(None, [True, True, True, False], monkeypatch)
    pace.wait(500)
    assert pace.yielded_s == pytest.approx(0.06)
    pace.wait(500)
    assert pace.yielded_s == pytest.approx(0.06)


def test_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also during a save."""
    pace = _pace(None, [True] * 1000, monkeypatch)
    pace.stop.set()
    with pytest.raises(DrainStoppedError):
        pace.wait(1)
