"""LagLimit: what exceeds it, and what is given up."""

from __future__ import annotations

from iobench.tiers.lag import LagLimit
from iobench.tiers.queue import Queued


def _waiting(*saved: tuple[int, float, int]) -> list[Queued]:
    """Return checkpoints of (step, time of the save, bytes)."""
    return [
        Queued(step=step, serial=step, since_s=since_s, created_s=0.0, size_bytes=size)
        for step, since_s, size in saved
    ]


_THREE = _waiting((3, 9.0, 10), (2, 5.0, 10), (1, 1.0, 10))  # the last saved one first


def test_age() -> None:
    """The oldest one counts; it is exact at the limit."""
    assert LagLimit(age_s=9.0).exceeded(_THREE, 10.0) == ""
    assert LagLimit(age_s=8.9).exceeded(_THREE, 10.0) == "a copy has waited 9 s, max_lag is 8.9 s"
    assert LagLimit(age_s=1.0).exceeded([], 10.0) == ""


def test_bytes() -> None:
    """Their sum counts."""
    assert LagLimit(age_s=99.0, size_bytes=30).exceeded(_THREE, 10.0) == ""
    why = LagLimit(age_s=99.0, size_bytes=29).exceeded(_THREE, 10.0)
    assert why == "30 B wait for copies, max_lag_size is 29 B"


def test_half() -> None:
    """Both are halved."""
    assert LagLimit(age_s=9.0, size_bytes=31).half() == LagLimit(age_s=4.5, size_bytes=15)
    assert LagLimit(age_s=9.0).half() == LagLimit(age_s=4.5)


def test_room_for_one_more() -> None:
    """It counts with the others; alone it always has room."""
    limit = LagLimit(age_s=99.0, size_bytes=35)
    assert limit.no_room(_THREE, 5, 10.0) == ""
    why = limit.no_room(_THREE, 6, 10.0)
    assert why == "36 B would wait for copies, max_lag_size is 35 B"
    assert limit.no_room([], 1000, 10.0) == ""
    assert LagLimit(age_s=8.0).no_room(_THREE, 1, 10.0) != ""


def test_given_up() -> None:
    """The oldest ones until the rest fits; the newest one is never given up."""

    def steps(limit: LagLimit) -> list[int]:
        return [one.step for one, _ in limit.late(_THREE, 10.0)]

    assert steps(LagLimit(age_s=99.0)) == []
    assert steps(LagLimit(age_s=4.9)) == [2, 1]
    assert steps(LagLimit(age_s=99.0, size_bytes=20)) == [1]
    assert steps(LagLimit(age_s=0.5, size_bytes=1)) == [2, 1]
