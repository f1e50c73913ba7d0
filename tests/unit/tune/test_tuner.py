"""The trials that a tuning requests and its conclusions, on simulated storage."""

from __future__ import annotations

import random

import pytest
from support.simulated_storage import (
    SimulatedStorage,
    Usage,
    World,
    hills,
    normal,
    space_of_writers,
    true_rate,
    worlds,
)
from support.tuning_worlds import GENERATORS

from iobench.errors import IobenchError
from iobench.stats.comparison import Finding
from iobench.tune.budget import Budget, TuningSizes
from iobench.tune.confirm import LAST_ROUNDS
from iobench.tune.objective import Objective
from iobench.tune.space import Candidate
from iobench.units import GIB, MIB


def test_equal_answers_lead_to_an_equal_outcome() -> None:
    """Seed and measurements determine the trials, their order and the chosen setting."""
    runs = []
    for _ in range(2):
        storage = SimulatedStorage(seed=3)
        runs.append((storage.tuner(space_of_writers()).run().verdict, storage.asked))
    assert runs[0] == runs[1]
    other = SimulatedStorage(seed=4)
    other.tuner(space_of_writers()).run()
    assert other.asked != runs[0][1]


def test_verified_trials_that_write_more_have_their_room() -> None:
    """In the first round of stalls there is one more save: still six rounds or more are
    confirmed."""
    storage = SimulatedStorage(seed=1, written_bytes=lambda size, verify: (5 + verify) * size)
    budget = Budget(max_s=36_000, max_bytes=5 * GIB)
    sizes = TuningSizes(largest=16 * MIB, fixed=True, fits=lambda size: size >= MIB)
    space = space_of_writers("buffered", "odirect", "uring")
    confirmation = storage.tuner(space, budget=budget, sizes=sizes).run().confirmation
    assert len(confirmation.able) == 4
    assert all(len(confirmation.losses[name]) >= 6 for name in confirmation.able)
    assert budget.written_bytes <= budget.max_bytes


def test_known_settings_come_first_and_the_confirmation_last() -> None:
    """The samples of the confirmation are larger than all before."""
    storage = SimulatedStorage(seed=5)
    space = space_of_writers()
    outcome = storage.tuner(space).run()
    labels = [one.label for one in space.known]
    assert {label for label, _ in storage.asked[: len(labels)]} == set(labels)
    phases = [step.phase for _, step in storage.asked]
    assert phases == sorted(phases, key=["probe", "race", "refine", "confirm"].index) or (
        phases.index("confirm") > max(i for i, p in enumerate(phases) if p != "confirm")
    )
    sizes = {step.phase: step.size_bytes for _, step in storage.asked}
    assert all(
        step.size_bytes < sizes["confirm"]
        for _, s in storage.asked
        if s.phase == "race"
        for step in [s]
    )
    confirmed = {label for label, step in storage.asked if step.phase == "confirm"}
    assert {"buffered", outcome.chosen.label} <= confirmed


def test_failures_are_kept_with_their_cause() -> None:
    """A writer that fails takes no further part, and its cause is reported. The others go on."""
    storage = SimulatedStorage(
        seed=2,
        noise=normal(0.02),
        error=lambda one, _: "TransferError: no ring" if one.writer == "uring" else None,
    )
    outcome = storage.tuner(space_of_writers()).run()
    assert outcome.failures() == {"uring": "TransferError: no ring"}
    assert outcome.chosen.writer == "odirect"
    assert sum(label.startswith("uring") for label, _ in storage.asked) == 1


def test_a_winner_whose_bytes_are_wrong_is_not_named() -> None:
    """The leader fails its verification: another is chosen, and the notes say so."""
    wrong = "DataMismatchError: 1 of 9 tensors came back other than they were saved"
    storage = SimulatedStorage(
        seed=2,
        error=lambda one, step: wrong if one.writer == "uring" and step.verify else None,
    )
    outcome = storage.tuner(space_of_writers()).run()
    assert outcome.chosen.writer != "uring"
    assert outcome.verdict.refuted
    assert wrong in outcome.failures().values()
    assert any("did not bear that out" in reason for reason in outcome.reasons())


@pytest.mark.parametrize("name", [*worlds(), "hills"])
def test_a_storage_is_not_decided_wrongly(name: str) -> None:
    """A decided winner is within 5% of the best, for any noise and any change of rates."""
    space = space_of_writers()
    for seed in range(2):
        world = worlds().get(name) or hills(seed)
        outcome = (storage := world.storage(seed)).tuner(space).run()
        part = world.part_of_best(outcome, storage)
        assert part >= 0.95 or not outcome.decided
        assert part >= 0.75  # the default stays where nothing is shown better
        over = outcome.verdict.over_baseline
        assert outcome.keeps_baseline is (over is None) is (outcome.chosen.label == "hybrid")
        assert next(outcome.reasons()).startswith("keep hybrid") is outcome.keeps_baseline
        if name in ("all settings equal", "hybrid as good as the best"):
            assert outcome.keeps_baseline
        if over is not None and not outcome.verdict.refuted:
            assert over.finding is Finding.BETTER


@pytest.mark.parametrize("name", GENERATORS)
def test_writers_that_slow_down_together_are_not_decided_wrongly(name: str) -> None:
    """At the end, and at the confirmed size, a decided winner is within 5% of the best."""
    for seed in range(3):
        storage = (world := GENERATORS[name](seed, 0.02)).storage(seed)
        outcome = storage.tuner(space_of_writers()).run()
        assert world.part_of_best(outcome, storage) >= 0.95 or not outcome.decided, seed


def test_all_of_one_kind_slow_down_in_the_confirmation() -> None:
    """All but aiofiles and buffered fall to a fifth in the last trials: aiofiles is chosen.

    In the race it was three times as slow as the leader, and too slow to be a close family.
    """

    def rate(one: Candidate, size: int, usage: Usage) -> float:
        slow = one.writer not in ("aiofiles", "buffered") and usage.written_bytes >= 66 * GIB
        return true_rate(one) * (0.2 if slow else 1.0)

    for seed in (1, 2):
        world = World(rate=rate, noise=normal(0.02))
        storage = world.storage(seed)
        outcome = storage.tuner(space_of_writers()).run()
        assert not outcome.decided
        assert outcome.chosen.writer == "aiofiles"
        assert any("did not" in one for one in outcome.reasons() if one.startswith("not decided"))


@pytest.mark.parametrize(("seed", "noise"), [(200_020, 0.02), (200_017, 0.05)])
def test_settings_near_one_another_run_in_the_same_rounds(seed: int, noise: float) -> None:
    """uring becomes slower in the race. Rounds with it only cannot compare settings of odirect.

    With both seeds a setting that is 6% below the best was decided before.
    """
    world = worlds(noise)["uring at half its rate after its 20th trial"]
    outcome = (storage := world.storage(seed)).tuner(space_of_writers()).run()
    assert world.part_of_best(outcome, storage) >= 0.95 or not outcome.decided
    rounds = {name: one.losses.keys() for name, one in outcome.race.trials.items()}
    trials = outcome.race.trials.values()
    tried = [one.candidate for one in trials if one.candidate.origin == "refined" and one.losses]
    near = [one for one in tried if one.writer == "odirect"]
    assert near
    for one in near:
        others = rounds.keys() - {one.label}
        together = [n for n in others if n.startswith("odirect") and rounds[n] & rounds[one.label]]
        earlier = [n for n in together if min(rounds[n]) < min(rounds[one.label])]
        assert earlier


def test_steps_that_are_better_are_also_tried_together() -> None:
    """Of each option the best step counts; a step that is worse does not."""
    space = space_of_writers("buffered", "odirect")
    tuner = SimulatedStorage(seed=1).tuner(space)
    losses = {
        "odirect": 1.0,
        "odirect,threads=3": 0.99,
        "odirect,block_size=4MiB": 0.98,
        "odirect,block_size=16MiB": 0.97,
        "odirect,fallocate=false": 1.01,
    }
    near = {one.label: one for one in space.neighbours(space.known[1])} | {
        "odirect": space.known[1]
    }
    for name, loss in losses.items():
        tuner.race.join(name, near[name]).losses[1] = loss
    (found,) = tuner._all_steps("odirect")
    assert found.label == "odirect,block_size=16MiB,threads=3"
    assert tuner._all_steps("odirect,threads=3") == []


def test_what_the_race_dropped_comes_back_where_the_confirmation_contradicts_it() -> None:
    """uring leads up to 512 MiB and is half as fast above: more settings of odirect are confirmed
    then."""
    world = worlds(0.02)["uring at half its rate above 512 MiB"]
    outcome = world.storage(1).tuner(space_of_writers()).run()
    assert outcome.confirmation.contenders[0].startswith("uring")
    assert outcome.verdict.refuted
    assert outcome.chosen.writer == "odirect"
    (said,) = [reason for reason in outcome.reasons() if "brought back" in reason]
    back = said.split("brought back: ")[1].split(", odirect")
    assert len([name for name in outcome.confirmation.able if name.startswith("odirect")]) > 1, back
    assert all(len(outcome.confirmation.losses[one]) >= 5 for one in outcome.confirmation.able)


def test_one_setting_of_each_family_is_confirmed_and_measured_again_at_the_end() -> None:
    """However slow it was in the race: its rate may differ at another size, or at the end."""
    outcome = SimulatedStorage(seed=5).tuner(space_of_writers()).run()
    writers = {outcome.race.trials[one].candidate.writer for one in outcome.confirmation.contenders}
    assert writers == set(outcome.space.dimensions)
    confirmation = outcome.confirmation
    assert len(confirmation.last) == LAST_ROUNDS
    for number in confirmation.last:
        last = [name for name, losses in confirmation.losses.items() if number in losses]
        assert {outcome.race.trials[one].candidate.writer for one in last} == writers
    assert max(max(one) for one in confirmation.losses.values()) == confirmation.last[-1]


def test_an_answer_within_five_percent_is_decided() -> None:
    """At 2% noise. Which of the equal settings is written does not matter."""
    outcome = SimulatedStorage(seed=5, noise=normal(0.02)).tuner(space_of_writers()).run()
    assert outcome.decided
    assert outcome.verdict.equals
    assert outcome.verdict.excess < 0.05
    assert not any(one.startswith("not decided") for one in outcome.reasons())


def test_doubts_leave_it_undecided() -> None:
    """At 10% noise another setting may be 5% better; every doubt is a reason."""
    outcome = SimulatedStorage(seed=6, noise=normal(0.1)).tuner(space_of_writers()).run()
    assert not outcome.decided
    assert outcome.verdict.excess > 0.05
    assert any("may be" in one for one in outcome.reasons() if one.startswith("not decided"))
    del outcome.race.trials[outcome.space.neighbours(outcome.chosen)[0].label]
    assert any("one step from" in one for one in outcome.reasons())


def test_the_gain_over_the_default() -> None:
    """The ratio with its interval is that of the paired samples of the confirmation."""
    outcome = SimulatedStorage(seed=4, noise=normal(0.02)).tuner(space_of_writers()).run()
    gain = outcome.confirmation.compare(outcome.chosen.label, "hybrid")
    assert gain is not None
    assert gain == outcome.verdict.over_baseline
    held = gain.ratio.interval
    assert held is not None
    assert not outcome.keeps_baseline
    assert next(outcome.reasons()) == (
        f"{outcome.chosen.label} is {gain.ratio.ratio:.2f} times as good as hybrid "
        f"({held.low:.2f} - {held.high:.2f}), the default"
    )


def test_limits() -> None:
    """Settings over --max-memory or --max-cpu do not take part in the end."""
    storage = SimulatedStorage(seed=1)
    limited = Objective(max_memory_bytes=4 * MIB)
    outcome = storage.tuner(space_of_writers(), objective=limited).run()
    assert outcome.chosen.options.to_dict()["block_size"] <= 4 * MIB
    over = [trial.cause for trial in outcome.race.trials.values() if not trial.able]
    assert over
    assert all("--max-memory is 4.00 MiB" in cause for cause in over)
    with pytest.raises(IobenchError, match=r"--max-cpu is 0\.01"):
        SimulatedStorage(seed=1).tuner(
            space_of_writers(), objective=Objective(max_cpu_s_per_gib=0.01)
        ).run()


def test_contenders_that_are_shown_worse_get_no_more_rounds_than_they_need() -> None:
    """hybrid is 20% slower: it has six rounds and the last ones; the others have more."""
    storage = SimulatedStorage(seed=3, noise=normal(0.02))
    budget = Budget(max_s=600, max_bytes=160 * GIB)
    confirmation = storage.tuner(space_of_writers(), budget=budget).run().confirmation
    rounds = {name: len(confirmation.losses[name]) for name in confirmation.able}
    assert rounds.pop("hybrid") == 6 + LAST_ROUNDS
    assert max(rounds.values()) > 6 + LAST_ROUNDS


def test_hopeless_writers_are_not_searched() -> None:
    """The page cache is five times slower at its known setting: its other settings are not
    tried."""
    storage = SimulatedStorage(seed=1)
    outcome = storage.tuner(space_of_writers()).run()
    tried = {label for label, _ in storage.asked}
    assert [label for label in tried if label.startswith("buffered")] == ["buffered"]
    assert any(note.startswith("buffered: ") and "23 other" in note for note in outcome.notes)


def test_one_writer_only() -> None:
    """It is tuned against its own defaults."""
    storage = SimulatedStorage(seed=1)
    outcome = storage.tuner(space_of_writers("odirect")).run()
    assert outcome.chosen.writer == "odirect"
    assert outcome.baseline == "odirect"


def test_draws_are_new_and_of_all_writers() -> None:
    """Each setting is drawn once, about as many of each writer, and no known one."""
    space = space_of_writers()
    drawn = space.draw(["odirect", "uring"], 20, {"odirect"}, random.Random(1))
    labels = [one.label for one in drawn]
    assert len(set(labels)) == 20
    assert "odirect" not in labels
    assert sum(one.writer == "uring" for one in drawn) == 10
    every = space.draw(["odirect"], 10_000, {"odirect"}, random.Random(1))
    assert len(every) == space.size_of("odirect") - 1
