"""The settings that a round measures, their order, and what is kept of the results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from support.simulated_storage import SimulatedStorage

from iobench.errors import IobenchError
from iobench.tune.budget import Budget, Cost
from iobench.tune.confirm import Confirmation, confirm
from iobench.tune.objective import Measurement, Objective, Step
from iobench.tune.race import Race
from iobench.tune.space import Candidate
from iobench.units import GIB, MIB

_NAMES = ("buffered", "odirect", "uring")
_SIZE = 64 * MIB


@dataclass(kw_only=True)
class Reported:
    """Progress that records each reported trial."""

    figures: list[str] = field(default_factory=list)

    def trial(self, candidate: Candidate, step: Step, figure: str) -> None:
        self.figures.append(f"{candidate.label} {step.round} {figure}")


@dataclass(kw_only=True)
class Played:
    """Rounds of three settings at `rates`, on a storage without noise."""

    race: Race
    storage: SimulatedStorage
    reported: Reported

    @classmethod
    def at(
        cls,
        *rates: float,
        error: Callable[[Candidate, Step], str | None] = lambda *_: None,
        max_memory_bytes: int | None = None,
        max_bytes: int = 100 * _SIZE,
    ) -> Played:
        by_name = dict(zip(_NAMES, rates, strict=True))
        storage = SimulatedStorage(
            seed=1,
            noise=lambda _: 0.0,
            rate=lambda one, _: by_name[one.writer] * MIB,
            error=error,
        )
        reported = Reported()
        race = Race(
            objective=Objective(max_memory_bytes=max_memory_bytes),
            budget=Budget(max_s=10_000, max_bytes=max_bytes),
            measure=storage,
            written_bytes=storage.written_bytes,
            report=reported.trial,
            rng=random.Random(1),
        )
        for name in _NAMES:
            race.join(name, Candidate.of(name, {}, "known-good"))
        return cls(race=race, storage=storage, reported=reported)

    @property
    def asked(self) -> list[tuple[str, int]]:
        """Return the settings that were measured, by round."""
        return [(name, step.round) for name, step in self.storage.asked]


def test_a_round_measures_each_once_and_is_paid_for() -> None:
    """Losses count by the number of the round. Those of the probe do not count, but are kept."""
    played = Played.at(100, 200, 400)
    played.race.run("probe", _NAMES, _SIZE, record=False)
    assert all(not trial.losses for trial in played.race.trials.values())
    played.race.run("race", ("uring", "odirect"), _SIZE)
    assert played.asked == [*((name, 1) for name in _NAMES), ("uring", 2), ("odirect", 2)]
    losses = {name: set(trial.losses) for name, trial in played.race.trials.items()}
    assert losses == {"buffered": set(), "odirect": {2}, "uring": {2}}
    assert played.race.budget.written_bytes == 5 * _SIZE
    assert [len(played.race.trials[name].measured) for name in _NAMES] == [1, 2, 2]
    assert played.reported.figures[-1].startswith("odirect 2 0.20 GiB/s")


def test_a_failure_or_a_limit_ends_a_setting() -> None:
    """With its cause. Failures and limits of the probe count too."""
    played = Played.at(
        100,
        200,
        400,
        error=lambda one, _: "OSError: no" if one.writer == "uring" else None,
        max_memory_bytes=2 * MIB,
    )
    with pytest.raises(IobenchError, match=r"no setting is left: .*uring: OSError: no"):
        played.race.run("probe", _NAMES, _SIZE, record=False)
    causes = {name: trial.cause for name, trial in played.race.trials.items()}
    assert causes["uring"] == "OSError: no"
    assert "--max-memory" in causes["odirect"]


@pytest.mark.parametrize(
    ("max_bytes", "until", "began", "rounds"),
    [
        (12, 0.0, True, 2),
        (6, 0.0, True, 2),
        (5, 0.0, True, 1),
        (3, 0.0, True, 1),
        (2, 0.0, False, 0),
        (12, 0.5, True, 2),
        (12, 0.6, True, 1),
        (12, 0.8, False, 0),
    ],
)
def test_a_rung_lasts_as_long_as_its_share(
    max_bytes: int, until: float, began: bool, rounds: int
) -> None:
    """It moves the bytes of so many trials, and reverses its order. It reports whether it could
    begin."""
    played = Played.at(200, 200, 200)
    played.race.run("probe", _NAMES, _SIZE, record=False)
    left = Budget(max_s=10_000, max_bytes=max_bytes * _SIZE)
    left.set_aside(Cost(time_s=0, written_bytes=0))
    played.race.budget = left
    assert played.race.rung("race", _SIZE, until=until) is began
    first, second = (
        [name for name, number in played.asked if number == wanted] for wanted in (2, 3)
    )
    assert [len(first), len(second)] == [3 if rounds > n else 0 for n in range(2)]
    if second:
        assert second == first[::-1]


def test_the_second_round_of_a_rung_has_the_remaining_settings() -> None:
    """A setting that fails in the first round is not in it. With one setting left there is no
    second round."""
    played = Played.at(
        200,
        200,
        200,
        error=lambda one, step: "no" if one.writer == "uring" and step.round == 2 else None,
    )
    played.race.run("probe", _NAMES, _SIZE, record=False)
    assert played.race.rung("race", _SIZE, until=0.0)
    assert sorted(name for name, number in played.asked if number == 3) == ["buffered", "odirect"]
    assert played.race.rung("race", _SIZE, until=0.0, names=["odirect"])
    assert [name for name, number in played.asked if number > 3] == ["odirect"]


def test_a_round_of_the_confirmation() -> None:
    """It is recorded by its number, and verified on request. A setting that fails leaves with its
    cause."""
    played = Played.at(
        100,
        200,
        400,
        error=lambda one, step: "no" if step.verify and one.writer == "uring" else None,
    )
    confirmation = Confirmation(contenders=list(_NAMES), baseline="buffered")
    confirm(played.race, confirmation, _NAMES, _SIZE, verify=_NAMES)
    confirm(played.race, confirmation, confirmation.able, _SIZE)
    assert confirmation.failed == {"uring": "no"}
    assert {name: sorted(losses) for name, losses in confirmation.losses.items()} == {
        "buffered": [1, 2],
        "odirect": [1, 2],
    }
    steps = [step for _, step in played.storage.asked]
    assert {step.phase for step in steps} == {"confirm"}
    assert [step.verify for step in steps] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(("limit", "out"), [(2 * MIB, True), (GIB, False)])
def test_a_confirmation_judges_limits_by_its_own_samples(limit: int, out: bool) -> None:
    """Every setting takes a block of a few MiB here; an earlier, larger value does not count."""
    played = Played.at(100, 200, 400, max_memory_bytes=limit)
    earlier = Step(phase="race", round=1, size_bytes=_SIZE)
    much = Measurement(took_s=1, spent_s=1, written_bytes=_SIZE, memory_bytes=2 * GIB)
    played.race.trials["odirect"].measured.append((earlier, much))
    confirmation = Confirmation(contenders=list(_NAMES), baseline="buffered")
    confirm(played.race, confirmation, ["odirect"], _SIZE)
    assert ("--max-memory" in confirmation.failed.get("odirect", "")) is out
    assert ("odirect" in confirmation.losses) is not out


def test_a_new_setting_is_expected_to_be_like_the_leader() -> None:
    """By rank; before any round of the race, like the best of the probe. Verification costs
    more."""
    played = Played.at(100, 400, 200)
    played.race.written_bytes = lambda size, verify: (2 if verify else 1) * size
    played.race.run("probe", _NAMES, _SIZE, record=False)
    cost = played.race.cost
    assert cost(["new"], _SIZE) == cost(["odirect"], _SIZE) != cost(["uring"], _SIZE)
    played.race.run("race", ("uring",), _SIZE)
    assert cost(["new"], _SIZE) == cost(["uring"], _SIZE)
    assert cost(["new", "odirect"], _SIZE, verify=True) == Cost(
        time_s=cost(["uring"], _SIZE).time_s + cost(["odirect"], _SIZE).time_s,
        written_bytes=4 * _SIZE,
    )
