"""Rounds: settings measured one after the other, in the race and in its confirmation."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from iobench.errors import IobenchError
from iobench.tune.budget import Budget, Cost
from iobench.tune.confirm import Confirmation
from iobench.tune.measurement import Measure, Measurement, Phase, Step
from iobench.tune.objective import Objective
from iobench.tune.race import Race, RaceStatus
from iobench.tune.search import ROUNDS
from iobench.tune.space import Candidate


@dataclass(kw_only=True)
class History:
    """Measurements by setting, in order, each with the step that requested it."""

    trials: dict[str, list[tuple[Step, Measurement]]] = field(default_factory=dict, init=False)

    def add(self, name: str, step: Step, measured: Measurement) -> None:
        """Add a trial of `name`."""
        self.trials.setdefault(name, []).append((step, measured))

    def of(self, name: str, phase: Phase | None = None) -> list[Measurement]:
        """Return the measurements of `name`, of one phase or of all."""
        return [one for step, one in self.trials.get(name, ()) if phase in (None, step.phase)]

    def by_probe(self, names: Iterable[str], loss: Callable[[Measurement], float]) -> list[str]:
        """Return those of `names` whose first trial had no error, the smallest loss first."""
        first = {name: self.trials[name][0][1] for name in names if name in self.trials}
        found = {name: loss(one) for name, one in first.items() if not one.error}
        return sorted(found, key=found.__getitem__)

    def expected_s(self, name: str, size_bytes: int) -> float:
        """Return the seconds of its last trial, with the I/O time scaled to `size_bytes`.

        Raises KeyError for a setting without a trial.
        """
        step, measured = self.trials[name][-1]
        return measured.expected_s(size_bytes / step.size_bytes)


class TuningProgress(Protocol):
    """Receives the progress of a tuning."""

    def phase(self, what: str) -> None:
        """Report that a phase of the tuning begins."""

    def trial(self, candidate: Candidate, step: Step, figure: str) -> None:
        """Report a measurement; `figure` is its rate or its error."""


class NoProgress:
    """Reports nothing."""

    def phase(self, what: str) -> None:
        """Report nothing."""

    def trial(self, candidate: Candidate, step: Step, figure: str) -> None:
        """Report nothing."""


@dataclass(kw_only=True)
class Rounds:
    """Measures settings one after the other, and keeps their measurements.

    The cost of each trial is taken from the `budget`. A setting that fails or exceeds a limit does
    not run again in the `race`. Round numbers continue from phase to phase.
    """

    race: Race[Candidate]
    objective: Objective
    budget: Budget
    measure: Measure
    written_bytes: Callable[[int, bool], int]
    progress: TuningProgress
    rng: random.Random
    history: History = field(default_factory=History, init=False)
    number: int = field(default=0, init=False)

    def rung(
        self, phase: Phase, size: int, *, until: float, names: Sequence[str] | None = None
    ) -> bool:
        """Run two rounds of `names`, or of all running settings, and drop those shown worse.

        The first round is in random order, the second in the reverse order. So a storage whose
        speed drifts affects all settings alike. A round begins only if it leaves `until` of the
        race's share. Returns False if the first round could not begin.
        """
        order = list(names or self.race.running)
        self.rng.shuffle(order)
        for number in range(ROUNDS):
            taking_part = [n for n in reversed(order) if self.race.trials[n].running]
            order = taking_part
            if len(taking_part) < (2 if number else 1):
                return True
            if not self.budget.races(self.cost(taking_part, size), until=until):
                return number > 0
            self.run(phase, taking_part, size)
            self.race.judge()
        return True

    def run(self, phase: Phase, names: Iterable[str], size: int, *, record: bool = True) -> None:
        """Run one round: each of `names` once. With `record=False` losses do not enter the race.

        Raises IobenchError when no setting is left in the race.
        """
        self.number += 1
        for name in names:
            measured = self._measure(name, Step(phase=phase, round=self.number, size_bytes=size))
            trial = self.race.trials[name]
            if measured.error:
                trial.end(RaceStatus.FAILED, measured.error)
                continue
            if record:
                trial.losses[self.number] = self.objective.loss(measured)
            if over := self.objective.over(self.history.of(name)):
                trial.end(RaceStatus.OVER, over)
        self._check_able()

    def confirm(
        self,
        confirmation: Confirmation,
        names: Sequence[str],
        size: int,
        *,
        verify: Collection[str],
    ) -> None:
        """Run one round of the confirmation: each of `names` once; `verify` are also compared."""
        self.number += 1
        for name in names:
            step = Step(phase="confirm", round=self.number, size_bytes=size, verify=name in verify)
            measured = self._measure(name, step)
            why = measured.error or self.objective.over(self.history.of(name, "confirm"))
            if why:
                confirmation.fail(name, why)
            else:
                confirmation.record(name, self.number, self.objective.loss(measured))

    def by_probe(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` whose probe had no error, the best first."""
        return self.history.by_probe(names, self.objective.loss)

    def cost(self, names: Sequence[str], size: int, *, verify: bool = False) -> Cost:
        """Return the expected cost of a round of `names`."""
        return Cost(
            time_s=sum(self._expected_s(name, size) for name in names),
            written_bytes=len(names) * self.written_bytes(size, verify),
        )

    def _expected_s(self, name: str, size: int) -> float:
        """Return the expected seconds by its last trial; for a new setting by the leader's."""
        if name not in self.history.trials:
            name = (self.race.ranked() or self.by_probe(self.race.trials))[0]
        return self.history.expected_s(name, size)

    def _measure(self, name: str, step: Step) -> Measurement:
        candidate = self.race.trials[name].candidate
        measured = self.measure(candidate, step)
        self.budget.spend(measured)
        self.history.add(name, step, measured)
        figure = measured.error or self.objective.show(
            self.objective.loss(measured), step.size_bytes
        )
        self.progress.trial(candidate, step, figure)
        return measured

    def _check_able(self) -> None:
        if not self.race.running:
            causes = {name: one.cause for name, one in self.race.trials.items() if not one.able}
            shown = "; ".join(f"{name}: {cause}" for name, cause in causes.items())
            raise IobenchError(f"no setting is left: {shown}")
