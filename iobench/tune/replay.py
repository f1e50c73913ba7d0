"""Replay: the race and the confirmation of a tuning, from the trials in its journal.

No target is needed, unlike for a resumed tuning. The decisions follow from the measurements, with
the rules of `Race` and `Confirmation`. Which settings were cut follows from those that ran next.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence
from contextlib import suppress

from iobench import workloads
from iobench.bench.judging.verdict import Context, volatile_of
from iobench.errors import IobenchError
from iobench.stats.comparison import LEAST_SAMPLES
from iobench.tune.budget import LAST_ROUNDS, LOOK_ROUNDS
from iobench.tune.confirm import Confirmation, confirm
from iobench.tune.journal import TrialRecord, TuningRecord
from iobench.tune.outcome import Outcome
from iobench.tune.race import Race, RaceStatus
from iobench.tune.space import Candidate, Dimension, Space
from iobench.units import format_size
from iobench.writers import registry


def replay(header: TuningRecord, trials: Sequence[TrialRecord]) -> tuple[Race, Outcome | None]:
    """Return the race of `trials`, and its outcome without notes, which a journal does not hold.

    The outcome is None where the confirmation did not end: the journal can be resumed then. Raises
    UnknownNameError for an unknown writer.
    """
    candidates = [Candidate.of(one.writer, one.options, one.origin) for one in trials]
    labels = [one.label for one in candidates]
    recorded = iter(trials)
    race = Race(
        objective=header.asked.goal(),
        budget=header.asked.budget(),
        measure=lambda *_: next(recorded).measured,
        written_bytes=lambda *_: 0,
        report=lambda *_: None,
        rng=random.Random(),
    )
    bounds = _rounds(trials)
    writers = header.asked.writers or dict.fromkeys(one.writer for one in trials)
    confirmation = Confirmation(contenders=[], baseline="")
    for at, (begin, end) in enumerate(bounds):
        names, first = labels[begin:end], trials[begin]
        until = len(trials) if first.phase == "confirm" else end
        for name, candidate in zip(labels[begin:until], candidates[begin:until], strict=True):
            if name not in race.trials:
                race.join(name, candidate)
        race.number = first.round - 1
        if first.phase == "confirm":
            if not confirmation.contenders:
                confirmation = _contenders(race, labels[begin:], writers)
                confirmation.floor = header.asked.floor
            confirm(race, confirmation, names, first.size_bytes)
            continue
        following = set(labels[slice(*bounds[at + 1])]) if at + 1 < len(bounds) else set()
        for name in names:
            if race.trials[name].able and first.phase != "probe":
                race.trials[name].run_again()
        with suppress(IobenchError):  # no setting was left: the tuning ended there
            race.run(first.phase, names, first.size_bytes, record=first.phase != "probe")
        if first.phase != "probe":
            race.judge()
            later = at + 2 < len(bounds) and trials[end].phase == "race"
            for name in [name for name in race.running if later and name not in following]:
                race.trials[name].end(RaceStatus.CUT, "others did better")
    _finish(confirmation, sorted({one.round for one in trials if one.phase == "confirm"}))
    return race, _outcome(header, trials, race, confirmation, writers)


def _rounds(trials: Sequence[TrialRecord]) -> list[tuple[int, int]]:
    groups = itertools.groupby(range(len(trials)), key=lambda number: trials[number].round)
    bounds = [list(numbers) for _, numbers in groups]
    return [(numbers[0], numbers[-1] + 1) for numbers in bounds]


def _contenders(race: Race, labels: Sequence[str], writers: Collection[str]) -> Confirmation:
    names = list(dict.fromkeys(labels))
    baseline = next((n for n, one in race.trials.items() if one.candidate.origin == "baseline"), "")
    asked = [name for name in names if race.trials[name].candidate.writer in writers]
    return Confirmation(
        contenders=list(dict.fromkeys([*race.ranked(names)[:1], *asked])),
        baseline=baseline if baseline in names else "",
    )


def _finish(confirmation: Confirmation, numbers: Sequence[int]) -> None:
    """Enter which contenders were eliminated, and which of the rounds `numbers` were the last."""
    for name, losses in confirmation.own_losses().items():
        if len(numbers) - LAST_ROUNDS > LOOK_ROUNDS and len(losses) < LEAST_SAMPLES:
            confirmation.eliminated.add(name)
    back = [n for n in numbers if any(n in confirmation.losses[x] for x in confirmation.eliminated)]
    confirmation.last += [number for number in back if number in numbers[LOOK_ROUNDS:]]
    if not confirmation.eliminated and len(numbers) >= LEAST_SAMPLES + LAST_ROUNDS:
        confirmation.last += numbers[-LAST_ROUNDS:]


def _outcome(
    header: TuningRecord,
    trials: Sequence[TrialRecord],
    race: Race,
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
                writer: Dimension.all_of(registry.writer_class(writer))
                for writer in dict.fromkeys(one.writer for one in trials)
                if writer in writers
            },
            known=tuple(race.trials[name].candidate for name in known),
        ),
        race=race,
        size_bytes=max(one.size_bytes for one in trials if one.phase == "confirm"),
        confirmation=confirmation,
        verdict=verdict,
        context=_context(header),
        notes=(),
    )


def _context(header: TuningRecord) -> Context:
    """Return the context of the verdicts; a workload that is not known here counts as scaled."""
    name, largest = header.asked.workload, header.asked.largest_bytes or 0
    known = name in workloads.names()
    whole = known and largest >= workloads.load(name).size_bytes(header.asked.rank)
    return Context(
        workload_bytes=0,
        scale=None if whole else f"{format_size(largest)} at most",
        volatile={None: volatile_of(header.storage)},
    )
