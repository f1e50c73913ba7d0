"""The backlog: what has waited too long."""

from __future__ import annotations

from iobench.remote.drain import late
from iobench.remote.queue import Queued

_THREE = [  # the last saved one first
    Queued(step=step, serial=step, since_s=since_s, created_s=0.0)
    for step, since_s in ((3, 9.0), (2, 5.0), (1, 1.0))
]


def test_late() -> None:
    """It is exact at the limit."""
    assert late(_THREE, 9.0, 10.0) == []
    assert [one.step for one, _ in late(_THREE, 4.9, 10.0)] == [2, 1]
    assert late(_THREE, 5.0, 10.0)[0][1] == "it waited 9 s, max_backlog is 5 s"
