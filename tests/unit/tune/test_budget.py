"""What a budget allows in the race and in the confirmation, in seconds and in bytes."""

from __future__ import annotations

import pytest

from iobench.tune.budget import SLACK, Budget, Cost
from iobench.tune.objective import Measurement


def cost(time_s: float, written_bytes: int) -> Cost:
    return Cost(time_s=time_s, written_bytes=written_bytes)


def budget(*, spent: Cost, reserve: Cost) -> Budget:
    """100 s and 1000 bytes, shared out before anything is spent."""
    made = Budget(max_s=100, max_bytes=1000)
    made.set_aside(reserve)
    made.spend(Measurement(took_s=7, spent_s=spent.time_s, written_bytes=spent.written_bytes))
    return made


def test_what_was_spent_is_left_no_more() -> None:
    """A trial is charged for the time since the one before it, which is longer than the trial
    itself."""
    made = Budget(max_s=100, max_bytes=1000)
    for _ in range(2):
        made.spend(Measurement(took_s=20, spent_s=30, written_bytes=300))
    assert (made.spent_s, made.written_bytes) == (60, 600)
    assert made.left_cost == Cost(time_s=40, written_bytes=400)


def test_what_is_set_aside_is_not_the_races() -> None:
    """The share is a part of what is left at that moment. A second call shares out again."""
    made = budget(spent=cost(10, 200), reserve=cost(0, 0))
    made.set_aside(cost(30, 500))
    assert made.share == cost(60, 300)
    assert made.left == 1.0
    made.set_aside(cost(15, 250))
    assert made.share == cost(75, 550)
    made.spend(Measurement(took_s=1, spent_s=15, written_bytes=55))
    assert made.share == cost(75, 550)
    assert made.left_cost == Cost(time_s=75, written_bytes=745)


@pytest.mark.parametrize(
    ("one_round", "until", "begins"),
    [
        (cost(10, 100), 0.0, True),
        (cost(20, 200), 0.0, True),  # 20 s and 200 bytes are left
        (cost(20.1, 200), 0.0, False),
        (cost(20, 201), 0.0, False),
        (cost(10, 100), 0.25, True),
        (cost(10.1, 100), 0.25, False),
        (cost(10, 101), 0.25, False),
        (cost(0, 0), 0.5, True),
        (cost(0, 0), 0.51, False),
    ],
)
def test_a_round_of_the_race_begins_where_it_fits(
    one_round: Cost, until: float, begins: bool
) -> None:
    """It begins if enough of the share is left after it. It never uses the reserve."""
    made = budget(spent=cost(20, 200), reserve=cost(60, 600))
    assert made.races(one_round, until=until) is begins


@pytest.mark.parametrize(
    ("each", "rounds", "until", "count"),
    [
        (cost(1, 1), 1, 0.0, 20),  # 20 s of 40 are left, 200 bytes of 400
        (cost(1, 1), 2, 0.0, 10),
        (cost(1, 50), 1, 0.0, 4),
        (cost(1, 50), 2, 0.0, 2),
        (cost(1, 51), 2, 0.0, 1),
        (cost(1, 1), 2, 0.25, 5),
        (cost(1, 1), 2, 0.5, 0),
        (cost(1, 1), 2, 0.75, 0),
    ],
)
def test_how_many_can_take_part(each: Cost, rounds: int, until: float, count: int) -> None:
    """As many as seconds and bytes both allow; none if less than `until` is left."""
    made = budget(spent=cost(20, 200), reserve=cost(60, 600))
    assert made.affordable(each, rounds=rounds, until=until) == count


@pytest.mark.parametrize(
    ("spent", "one_round", "enough", "begins"),
    [
        (cost(20, 200), cost(80 / SLACK, 800), True, True),
        (cost(20, 200), cost(80 / SLACK, 801), True, False),
        (cost(20, 200), cost(80 / SLACK, 801), False, False),  # bytes are known before
        (cost(20, 200), cost(80.1 / SLACK, 800), True, False),
        (cost(20, 200), cost(80.1 / SLACK, 800), False, True),
        (cost(99, 200), cost(50, 800), False, True),
        (cost(160, 200), cost(50, 800), False, True),  # as much again as the reserve
        (cost(160.1, 200), cost(50, 800), False, False),
    ],
)
def test_a_round_of_the_confirmation_begins(
    spent: Cost, one_round: Cost, enough: bool, begins: bool
) -> None:
    """If its bytes fit. With too few samples the time may be exceeded, up to a limit."""
    made = budget(spent=spent, reserve=cost(60, 600))
    assert made.confirms(one_round, enough=enough) is begins
