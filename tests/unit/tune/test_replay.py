"""A journal alone leads to the conclusions of the tuning that wrote it."""

from __future__ import annotations

import dataclasses

import pytest
from support.journals import HEADER, tuned
from support.simulated_storage import SimulatedStorage, normal, space_of_writers, worlds

from iobench.report.tuning import notes
from iobench.tune.outcome import Outcome
from iobench.tune.race import Race
from iobench.tune.replay import replay


def said(outcome: Outcome) -> list[list[str]]:
    """The words of each reason."""
    return [sorted(reason.replace(",", " ").split()) for reason in outcome.reasons()]


def outcome_of(found: tuple[Race, Outcome | None]) -> Outcome:
    assert found[1] is not None
    return found[1]


@pytest.mark.parametrize(
    ("name", "seed"), [("steady", 3), ("uring at half its rate above 512 MiB", 1)]
)
def test_the_outcome_is_that_of_the_tuning(name: str, seed: int) -> None:
    """Choice, reasons, standings, losses and budget.

    A journal has neither the tuner's own notes nor the order of equal settings.
    """
    real, trials = tuned(worlds()[name].storage(seed))
    found = outcome_of(replay(HEADER, trials))
    assert found.verdict.chosen == real.verdict.chosen
    assert set(found.verdict.equals) == set(real.verdict.equals)
    assert said(found) == said(dataclasses.replace(real, notes=()))
    shown = [(one.candidate.label, one.loss, one.interval) for one in found.standings()]
    assert shown == [(one.candidate.label, one.loss, one.interval) for one in real.standings()]
    assert (found.race.budget.spent_s, found.space.size) == (
        real.race.budget.spent_s,
        real.space.size,
    )
    losses = {label: entry.losses for label, entry in found.race.trials.items()}
    assert losses == {label: entry.losses for label, entry in real.race.trials.items()}


def test_failures_and_their_causes_are_found() -> None:
    storage = SimulatedStorage(
        seed=2, error=lambda one, _: "no ring" if one.writer == "uring" else None
    )
    real, trials = tuned(storage)
    assert outcome_of(replay(HEADER, trials)).failures() == real.failures()


def test_a_tuning_that_did_not_end_has_no_outcome() -> None:
    """Its race is still known."""
    _, trials = tuned(SimulatedStorage(seed=1))
    before = [one for one in trials if one.phase != "confirm"]
    race, outcome = replay(HEADER, before)
    assert outcome is None
    assert race.ranked()
    assert replay(HEADER, [])[0].trials == {}


def test_the_noise_floor_is_that_of_the_journal() -> None:
    """By the floor that the tuning had, the baseline stays; the notes name its record."""
    storage = SimulatedStorage(seed=5, noise=normal(0.02))
    real = storage.tuner(space_of_writers(), floor=9.0).run()
    assert real.verdict.chosen == real.baseline
    _, trials = tuned(SimulatedStorage(seed=5, noise=normal(0.02)))
    asked = dataclasses.replace(HEADER.asked, floor=9.0, floor_record="results/aa.jsonl")
    header = dataclasses.replace(HEADER, asked=asked)
    found = outcome_of(replay(header, trials))
    assert found.verdict.chosen == found.baseline
    assert "differences up to 900.0% are noise, by A/A in results/aa.jsonl" in list(
        notes(found, header)
    )
    assert outcome_of(replay(HEADER, trials)).verdict.chosen != found.baseline
