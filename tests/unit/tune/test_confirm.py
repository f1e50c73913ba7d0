"""Confirmation: what fresh samples show, and what they do not."""

from __future__ import annotations

import math
import random

import pytest

from iobench.tune.confirm import Confirmation


def confirmed(rounds: int = 6, **losses: float) -> Confirmation:
    """The first setting led the race; `buffered` is the baseline. Losses vary by 1%."""
    made = Confirmation(contenders=list(losses), baseline="buffered")
    for number in range(rounds):
        for position, (name, loss) in enumerate(losses.items()):
            made.record(name, number, loss * (1 + 0.01 * ((number + position) % 2)))
    return made


def test_a_clear_winner() -> None:
    """Half of the baseline's loss: it is chosen, twice as good, and has no equal."""
    verdict = confirmed(winner=1.0, known=1.5, buffered=2.0).verdict()
    assert verdict is not None
    assert (verdict.chosen, verdict.equals, verdict.refuted) == ("winner", (), False)
    assert verdict.over_baseline is not None
    assert verdict.over_baseline.ratio.ratio == pytest.approx(2.0, rel=0.02)


def test_no_winner_over_the_baseline() -> None:
    """The leader of the race is not shown better than the baseline, so it is not chosen.

    That does not contradict the race: they are equal.
    """
    verdict = confirmed(winner=1.0, buffered=1.01).verdict()
    assert verdict is not None
    assert verdict.chosen == "buffered"
    assert verdict.over_baseline is None
    assert not verdict.refuted


def test_a_leader_that_the_confirmation_refutes() -> None:
    """The leader of the race is now slower than the best known setting, which is chosen."""
    verdict = confirmed(winner=1.5, known=1.0, buffered=3.0).verdict()
    assert verdict is not None
    assert (verdict.chosen, verdict.refuted) == ("known", True)


def test_equals_are_named() -> None:
    """No difference to the runner-up is shown: one is chosen, and the other is named."""
    verdict = confirmed(winner=1.0, known=1.005, buffered=3.0).verdict()
    assert verdict is not None
    assert verdict.equals == ("known",)
    assert not verdict.refuted


def test_a_failure_is_not_chosen() -> None:
    """A leader with wrong bytes is not chosen, whatever its rate."""
    made = confirmed(winner=1.0, known=1.5, buffered=2.0)
    made.failed["winner"] = "3 of 9 tensors came back other than they were saved"
    verdict = made.verdict()
    assert verdict is not None
    assert (verdict.chosen, verdict.refuted) == ("known", True)


def test_only_the_baseline() -> None:
    """A single setting is chosen."""
    verdict = confirmed(buffered=2.0).verdict()
    assert verdict is not None
    assert (verdict.chosen, verdict.equals, verdict.refuted) == ("buffered", (), False)


@pytest.mark.slow
def test_how_often_equals_are_called_better() -> None:
    """Three settings as good as the baseline, 10% noise, six rounds: at most 1 of 20 confirmations
    names a winner."""
    wrong = 0
    for seed in range(60):
        rng = random.Random(seed)
        made = Confirmation(contenders=["a", "b", "c", "buffered"], baseline="buffered")
        for number in range(6):
            for name in made.contenders:
                made.record(name, number, 2.718 ** rng.gauss(0, 0.1))
        verdict = made.verdict()
        assert verdict is not None
        wrong += verdict.chosen != "buffered"
    assert wrong <= 3, f"{wrong} of 60"


@pytest.mark.parametrize(("rounds", "enough"), [(4, False), (5, True), (6, True)])
def test_five_rounds_are_enough_for_a_claim(rounds: int, enough: bool) -> None:
    """Each contender that has not failed needs five rounds."""
    made = confirmed(rounds, winner=1.0, known=1.5, buffered=2.0)
    assert made.enough is enough
    del made.losses["known"][0]
    assert made.enough is (rounds > 5)
    made.failed["known"] = "OSError: no"
    assert made.enough is enough


def test_contenders_that_are_shown_worse_are_not_open() -> None:
    """From six rounds on. A single contender needs no more rounds."""
    assert confirmed(5, winner=1.0, known=1.005, buffered=3.0).open == [
        "winner",
        "known",
        "buffered",
    ]
    assert confirmed(6, winner=1.0, known=1.005, buffered=3.0).open == ["winner", "known"]
    assert confirmed(6, winner=1.0, known=1.5, buffered=3.0).open == []


def test_excess_is_an_upper_limit() -> None:
    """Of four equal contenders, the first has an excess of 0 over the second, rarely more."""
    above = 0
    rng = random.Random(1)
    for _ in range(200):
        made = Confirmation(contenders=["a", "b"], baseline="b")
        for number in range(6):
            for name, loss in {"a": 1.0, "b": 1.0, "c": 2.0, "d": 2.0}.items():
                made.record(name, number, loss * math.exp(rng.gauss(0, 0.05)))
        above += made.excess("a") < 0
    assert 2 <= above <= 20


def test_excess_counts_contenders_that_were_eliminated_but_not_those_that_failed() -> None:
    """Two rounds of one that is 10% better leave an excess of 10% or more."""
    made = confirmed(winner=1.0, known=1.2, buffered=2.0)
    assert made.excess("winner") < 0
    made.contenders += ["early"]
    for number in range(2):
        made.record("early", number, 0.9)
    made.eliminated.add("early")
    assert made.excess("winner") > 0.1
    made.failed["early"] = "wrong bytes"
    assert made.excess("winner") < 0


def test_a_difference_within_the_noise_floor_is_none() -> None:
    """A tenth less than the baseline is a lead by the convention, and none by a floor of 20%."""
    made = confirmed(winner=1.0, buffered=1.1)
    verdict = made.verdict()
    assert verdict is not None
    assert verdict.chosen == "winner"
    made.floor = 0.2
    verdict = made.verdict()
    assert verdict is not None
    assert (verdict.chosen, verdict.equals) == ("buffered", ("winner",))
