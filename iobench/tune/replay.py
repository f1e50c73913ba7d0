"""Replay: the race and the confirmation of a tuning, from the trials in its journal.

No target is needed, unlike for a resumed tuning. The decisions follow from the measurements, with
the rules of `Race` and `Confirmation`. Which settings were cut follows from those that ran next.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from iobench import workloads
from iobench.bench.judging.verdict import Context, volatile_of
from iobench.stats.comparison import LEAST_FLOOR, LEAST_SAMPLES
from iobench.tune.budget import Budget
from iobench.tune.confirm import Confirmation
from iobench.tune.journal import TrialRecord, TuningRecord
from iobench.tune.measurement import Step
from iobench.tune.objective import Objective
from iobench.tune.outcome import Outcome
from iobench.tune.race import Race, RaceStatus
from iobench.tune.rounds import History
from iobench.tune.search import LAST_ROUNDS, LOOK_ROUNDS
from iobench.tune.space import Candidate, Dimension, Space
from iobench.units import format_size
from iobench.writers import registry

__all__ = ["ReplayedTuning", "replay"]


@dataclass(frozen=True, kw_only=True)
class ReplayedTuning:
    """A journal's trials with the conclusions from them.

    `outcome` is None where the confirmation did not end: the journal can be resumed then. Its notes
    are empty: a journal does not hold them.
    """

    header: TuningRecord
    trials: tuple[TrialRecord, ...]
    objective: Objective
    race: Race[Candidate]
    labels: tuple[str, ...]
    """The label of the setting of each trial."""
    outcome: Outcome | None


def replay(header: TuningRecord, trials: Sequence[TrialRecord]) -> ReplayedTuning:
    """Return the conclusions from `trials`. Raises UnknownNameError for an unknown writer."""
    objective = _objective(header.asked)
    budget = Budget(max_s=header.asked["max_s"], max_bytes=header.asked["max_bytes"])
    race, history = Race[Candidate](), History()
    candidates = [Candidate.of(one.writer, one.options, one.origin) for one in trials]  # type: ignore[arg-type]  # a word of the journal
    labels = [one.label for one in candidates]
    rounds = _rounds(trials)
    for at, (begin, end) in enumerate(rounds):
        following = set(labels[slice(*rounds[at + 1])]) if at + 1 < len(rounds) else set()
        for number in range(begin, end):
            one, name = trials[number], labels[number]
            if name not in race.trials:
                race.join(name, candidates[number])
            budget.spend(one.measured)
            history.add(name, _step(one), one.measured)
            if one.phase != "confirm":
                _record(race, history, objective, name, one)
        if trials[begin].phase in ("race", "refine"):
            race.judge()
            later = at + 2 < len(rounds) and trials[end].phase == "race"
            for name in [name for name in race.running if later and name not in following]:
                race.trials[name].end(RaceStatus.CUT, "others did better")
    writers = header.asked.get("writers") or dict.fromkeys(one.writer for one in trials)
    floor = header.asked.get("floor", LEAST_FLOOR)  # absent in older journals
    confirmation = _confirmation(race, objective, history, trials, labels, writers, floor)
    return ReplayedTuning(
        header=header,
        trials=tuple(trials),
        objective=objective,
        race=race,
        labels=tuple(labels),
        outcome=_outcome(header, trials, objective, budget, race, history, confirmation, writers),
    )


def _rounds(trials: Sequence[TrialRecord]) -> list[tuple[int, int]]:
    """Return begin and end of each round."""
    groups = itertools.groupby(range(len(trials)), key=lambda number: trials[number].round)
    bounds = [list(numbers) for _, numbers in groups]
    return [(numbers[0], numbers[-1] + 1) for numbers in bounds]


def _step(one: TrialRecord) -> Step:
    return Step(phase=one.phase, round=one.round, size_bytes=one.size_bytes, verify=one.verify)


def _record(
    race: Race[Candidate], history: History, objective: Objective, name: str, one: TrialRecord
) -> None:
    """Enter one trial before the confirmation; probes have no loss in the race."""
    entry = race.trials[name]
    if one.measured.error:
        entry.end(RaceStatus.FAILED, one.measured.error)
        return
    if one.phase != "probe":
        if not entry.running and entry.able:
            entry.run_again()
        entry.losses[one.round] = objective.loss(one.measured)
    if over := objective.over(history.of(name)):
        entry.end(RaceStatus.OVER, over)


def _confirmation(
    race: Race[Candidate],
    objective: Objective,
    history: History,
    trials: Sequence[TrialRecord],
    labels: Sequence[str],
    writers: Collection[str],
    floor: float,
) -> Confirmation:
    own = [(one, name) for one, name in zip(trials, labels, strict=True) if one.phase == "confirm"]
    names = list(dict.fromkeys(name for _, name in own))
    leader = race.ranked(names)[:1]
    baseline = next((n for n, one in race.trials.items() if one.candidate.origin == "baseline"), "")
    asked = [name for name in names if race.trials[name].candidate.writer in writers]
    confirmation = Confirmation(
        contenders=list(dict.fromkeys([*leader, *asked])),
        baseline=baseline if baseline in names else "",
        floor=floor,
    )
    for one, name in own:
        if why := one.measured.error or objective.over(history.of(name, "confirm")):
            confirmation.fail(name, why)
        else:
            confirmation.record(name, one.round, objective.loss(one.measured))
    numbers = list(dict.fromkeys(one.round for one, _ in own))
    for name, losses in confirmation.own_losses().items():
        if len(numbers) - LAST_ROUNDS > LOOK_ROUNDS and len(losses) < LEAST_SAMPLES:
            confirmation.eliminate(name)
    back = [n for n in numbers if any(n in confirmation.losses[x] for x in confirmation.eliminated)]
    confirmation.last += [number for number in back if number in numbers[LOOK_ROUNDS:]]
    if not confirmation.eliminated and len(numbers) >= LEAST_SAMPLES + LAST_ROUNDS:
        confirmation.last += numbers[-LAST_ROUNDS:]
    return confirmation


def _outcome(
    header: TuningRecord,
    trials: Sequence[TrialRecord],
    objective: Objective,
    budget: Budget,
    race: Race[Candidate],
    history: History,
    confirmation: Confirmation,
    writers: Collection[str],
) -> Outcome | None:
    verdict = confirmation.verdict()
    if verdict is None:
        return None
    known = dict.fromkeys(name for name, one in race.trials.items() if one.candidate.well_known)
    return Outcome(
        space=Space(
            dimensions={
                writer: tuple(
                    Dimension.of(info)
                    for info in registry.writer_class(writer).Options.describe()
                    if info.search
                )
                for writer in dict.fromkeys(one.writer for one in trials)
                if writer in writers
            },
            known=tuple(race.trials[name].candidate for name in known),
        ),
        objective=objective,
        budget=budget,
        size_bytes=max(one.size_bytes for one in trials if one.phase == "confirm"),
        trials=race.trials,
        history=history,
        confirmation=confirmation,
        verdict=verdict,
        context=_context(header),
        notes=(),
    )


def _objective(asked: Any) -> Objective:
    return Objective(
        goal=asked["objective"],
        max_memory_bytes=asked.get("max_memory_bytes"),
        max_cpu_s_per_gib=asked.get("max_cpu_s_per_gib"),
    )


def _context(header: TuningRecord) -> Context:
    """Return the context of the verdicts; a workload that is not known here counts as scaled."""
    name, largest = header.asked["workload"], header.asked.get("largest_bytes") or 0
    whole = name in workloads.names() and largest >= workloads.load(name).size_bytes(
        header.asked["rank"]
    )
    return Context(
        workload_bytes=0,
        scale=None if whole else f"{format_size(largest)} at most",
        volatile=volatile_of(header.storage),
    )
