"""Replay: the race and the confirmation of a tuning, from the trials in its journal.

No target is needed, unlike for a resumed tuning. The decisions follow from the measurements, with
the rules of `Race` and `Confirmation`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from contextlib import suppress

from iobench import workloads
from iobench.bench.judging.verdict import Context, volatile_of
from iobench.errors import IobenchError
from iobench.stats.comparison import LEAST_SAMPLES
from iobench.tune.budget import LAST_ROUNDS, LOOK_ROUNDS
from iobench.tune.confirm import Confirmation, confirm
from iobench.tune.journal import TrialRecord, TuningRecord
from iobench.tune.outcome import Outcome
from iobench.tune.race import Race
from iobench.tune.space import Candidate, Dimension, Space
from iobench.units import format_size
from iobench.writers import registry


def replay(header: TuningRecord, trials: Sequence[TrialRecord]) -> tuple[Race, Outcome | None]:
    """Return the race of `trials`, and its outcome without notes, which a journal does not hold.

    The outcome is None where the confirmation did not end: the journal can be resumed then. Raises
    UnknownNameError for an unknown writer.
    """
    recorded = iter(trials)
    race = Race(
        objective=header.asked.goal(),
        budget=header.asked.budget(),
        measure=lambda *_: next(recorded).measured,
        written_bytes=lambda *_: 0,
        report=lambda *_: None,
        rng=random.Random(),
    )
    candidates = [Candidate.of(one.writer, one.options, one.origin) for one in trials]
    labels = [one.label for one in candidates]
    for label, candidate in zip(labels, candidates, strict=True):
        if label not in race.trials:
            race.join(label, candidate)
    confirmation = Confirmation(contenders=[], baseline="", floor=header.asked.floor)
    for _, numbers in itertools.groupby(range(len(trials)), key=lambda one: trials[one].round):
        begin, *_ = taking_part = list(numbers)
        names, first = [labels[one] for one in taking_part], trials[begin]
        race.number = first.round - 1
        if first.phase == "confirm":
            if not confirmation.contenders:
                _join(confirmation, race, labels[begin:])
            confirm(race, confirmation, names, first.size_bytes)
            continue
        with suppress(IobenchError):  # no setting was left: the tuning ended there
            race.run(first.phase, names, first.size_bytes, record=first.phase != "probe")
    _finish(confirmation, sorted({one.round for one in trials if one.phase == "confirm"}))
    return race, _outcome(header, trials, race, confirmation)


def _join(confirmation: Confirmation, race: Race, labels: Sequence[str]) -> None:
    """Enter the settings that were confirmed, the leader of the race first."""
    names = list(dict.fromkeys(labels))
    confirmation.contenders += dict.fromkeys([*race.ranked(names)[:1], *names])
    origins = {race.trials[name].candidate.origin: name for name in names}
    confirmation.baseline = origins.get("baseline", "")


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
