"""Which settings a race eliminates, given the losses of its rounds."""

from __future__ import annotations

import random

import pytest
from support.simulated_storage import heavy_tails

from iobench.tune.budget import Budget
from iobench.tune.objective import Objective
from iobench.tune.race import Race
from iobench.tune.space import Candidate

_ANY = Candidate.of("buffered", {}, "drawn")


def race(*names: str) -> Race:
    """A race whose losses the test sets: nothing is measured."""
    made = Race(
        objective=Objective(),
        budget=Budget(),
        measure=None,
        written_bytes=None,
        report=None,
        rng=random.Random(1),
    )
    for name in names:
        made.join(name, _ANY)
    return made


def run(one: Race, number: int, losses: dict[str, float]) -> None:
    for name, loss in losses.items():
        one.trials[name].losses[number] = loss


def test_one_round_eliminates_no_setting() -> None:
    """However large the difference is: the round may have been disturbed."""
    one = race("fast", "slow")
    run(one, 1, {"fast": 1.0, "slow": 10.0})
    assert one.judge() == []


def test_clearly_worse_in_two_rounds_is_eliminated() -> None:
    """Twice the loss in two rounds of ten contenders whose noise is small."""
    names = [f"c{i}" for i in range(10)]
    one = race(*names, "slow")
    for number in (1, 2):
        run(one, number, {n: 1.0 + 0.01 * ((i * number) % 3) for i, n in enumerate(names)})
        run(one, number, {"slow": 2.0})
    assert one.judge() == ["slow"]
    assert not one.trials["slow"].running
    assert one.trials["slow"].able


def test_one_outlier_eliminates_no_setting() -> None:
    """Ten times the loss in one of three rounds, and equal losses in the others, prove nothing."""
    one = race("a", "b", "c", "d")
    for number in (1, 2, 3):
        run(one, number, {"a": 1.0, "b": 1.01, "c": 0.99, "d": 10.0 if number == 2 else 1.0})
    assert one.judge() == []


def test_drift_is_no_difference() -> None:
    """Rounds of very different speed, with equal losses in each, eliminate no setting."""
    one = race("a", "b", "c", "d")
    for number in range(1, 7):
        pace = 1.5**number
        run(one, number, {n: pace * (1 + 0.01 * ((i + number) % 3)) for i, n in enumerate("abcd")})
    assert one.judge() == []


def test_less_than_the_noise_floor_is_no_difference() -> None:
    """1% in each of twenty rounds without noise is below the smallest claimed difference."""
    one = race("a", "b")
    for number in range(20):
        run(one, number, {"a": 1.0, "b": 1.01})
    assert one.judge() == []


def test_newcomers_are_compared_in_the_rounds_of_both() -> None:
    """A setting that joins after the storage became slow is not worse for that."""
    one = race("old", "other")
    for number in (1, 2):
        run(one, number, {"old": 1.0, "other": 1.3})
    one.join("new", "new")
    for number in (3, 4):
        run(one, number, {"old": 3.0, "other": 3.9, "new": 2.4})
    assert one.ranked() == ["new", "old", "other"]
    assert one.ratio("new", "old") == pytest.approx(0.8)
    assert one.ratio("new", "new") == 1.0


def test_luck_in_one_round_makes_no_leader() -> None:
    """A newcomer that was slightly better once ranks behind a setting that was good ten times."""
    one = race("steady", "other")
    rng = random.Random(1)
    for number in range(10):
        run(one, number, {n: 1 + rng.gauss(0, 0.1) for n in ("steady", "other")})
    one.join("lucky", "lucky")
    run(one, 10, {"steady": 1.0, "other": 1.1, "lucky": 0.97})
    assert one.ranked()[0] != "lucky"


def test_a_path_that_degrades_loses_its_lead() -> None:
    """It is fast for three rounds and slow for seven: the others lead in the end."""
    one = race("steady", "degrading", "other")
    for number in range(10):
        run(one, number, {"steady": 1.0, "other": 1.05, "degrading": 0.5 if number < 3 else 2.0})
    assert one.ranked()[0] == "steady"
    assert "degrading" not in one.judge()  # its early rounds speak for it: no proof
    for number in range(10, 30):
        run(one, number, {"steady": 1.0, "other": 1.05, "degrading": 2.0})
    assert "degrading" in one.judge()


def test_the_best_is_rarely_eliminated() -> None:
    """5% better than nine others, with heavy-tailed noise of 10%: it is eliminated in at most 6 of
    60 races of four rounds. docs/autotune.md has the figures of many more."""
    wrong = 0
    for seed in range(60):
        rng, noise = random.Random(seed), heavy_tails(0.10)
        names = [f"c{i}" for i in range(10)]
        one = race(*names)
        for number in range(4):
            run(one, number, {n: 2.718 ** (noise(rng) + (0.05 if n != "c0" else 0)) for n in names})
            one.judge()
        wrong += not one.trials["c0"].running
    assert wrong <= 6, f"{wrong} of 60"


def test_cut_leaves_the_best() -> None:
    """`cut` keeps so many."""
    one = race("a", "b", "c")
    run(one, 1, {"a": 3.0, "b": 1.0, "c": 2.0})
    one.cut(2)
    assert list(one.running) == ["b", "c"]


def test_an_empty_race() -> None:
    """Before any measurement there is no leader, and no setting is eliminated."""
    one = race("a")
    assert (one.ranked(), one.judge(), one.ratio("a", "a")) == ([], [], None)
