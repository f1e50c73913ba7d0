"""The backlog: what exceeds it, and what is given up."""

from __future__ import annotations

from iobench.remote.drain import exceeded, late
from iobench.remote.queue import Queued

_THREE = [  # the last saved one first
    Queued(step=step, serial=step, since_s=since_s, created_s=0.0)
    for step, since_s in ((3, 9.0), (2, 5.0), (1, 1.0))
]


def test_exceeded() -> None:
    """The oldest one counts; it is exact at the limit."""
    assert exceeded(_THREE, 9.0, 10.0) == ""
    assert exceeded(_THREE, 8.9, 10.0) == "a copy has waited 9 s, max_backlog is 8.9 s"
    assert exceeded([], 1.0, 10.0) == ""


def test_given_up() -> None:
    """Those that have waited too long; the newest one is never given up."""
    assert late(_THREE, 99.0, 10.0) == []
    assert [one.step for one, _ in late(_THREE, 4.9, 10.0)] == [2, 1]
    assert [one.step for one, _ in late(_THREE, 0.5, 10.0)] == [2, 1]
    assert late(_THREE, 5.0, 10.0)[0][1] == "it waited 9 s, max_backlog is 5 s"
