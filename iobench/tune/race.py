"""Race: measures settings in rounds, and decides from their losses which are dropped.

Losses are positive and smaller is better (seconds). In each round all running contenders are
measured one after the other, so losses are comparable within a round. A contender is dropped when
it is *shown* worse than the leader. Two conditions must hold:

- The sign test's interval of its paired log ratios to the leader is beyond the noise floor. With
  few rounds, every round must agree, so an outlier in one round is not enough.
- The median of those ratios is `_Z` standard errors above zero. The noise is pooled over all
  contenders: two rounds of twenty contenders give a good estimate, two rounds of two do not.

The noise is the residual after median polish removes the effects of contenders and rounds (Tukey,
Exploratory Data Analysis, 1977, chapter 11). It is 1.4826 MAD, which heavy tails do not affect. The
polish makes a residual zero for each effect. These are left out (Maronna, Martin and Yohai, Robust
Statistics, 2006, section 4.4): with them the noise of four contenders in seven rounds is 30% low.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from iobench.errors import IobenchError
from iobench.stats.comparison import Comparison, Finding, compare_pairs
from iobench.tune.budget import ROUNDS, Budget, Cost
from iobench.tune.objective import Measure, Measurement, Objective, Phase, Step
from iobench.tune.space import Candidate

_Z = 3.5  # high, because the best of many leads partly by luck; measured in docs/autotune.md
_UNKNOWN_NOISE = 0.10  # of a log, while too few rounds have been run to estimate it
_LEAST_NOISE = 0.01
_FEWEST_FREE = 4  # degrees of freedom that an estimate of the noise needs
_SWEEPS = 20


@dataclass(kw_only=True)
class RaceEntry:
    """One contender: its measurements, its loss in each round, and whether it still runs.

    `cause` says why it failed or which limit it exceeded; empty for others, however slow they are.
    """

    candidate: Candidate
    measured: list[tuple[Step, Measurement]] = field(default_factory=list)
    """In order, each with the step that requested it."""
    losses: dict[int, float] = field(default_factory=dict)
    running: bool = True
    cause: str = ""

    @property
    def able(self) -> bool:
        """Whether it has neither failed nor exceeded a limit, however slow it is."""
        return not self.cause

    def fail(self, cause: str) -> None:
        """End it for good."""
        self.running, self.cause = False, cause

    def of(self, phase: Phase | None = None) -> list[Measurement]:
        """Return its measurements of one phase, or of all."""
        return [one for step, one in self.measured if phase in (None, step.phase)]

    def expected_s(self, size_bytes: int) -> float:
        """Return the seconds of its last trial, with the I/O time scaled to `size_bytes`."""
        step, measured = self.measured[-1]
        return measured.expected_s(size_bytes / step.size_bytes)


@dataclass(kw_only=True)
class Race:
    """Contenders by name, in the order in which they joined, and the rounds that measure them.

    The cost of each trial is taken from the `budget`. A contender that fails or exceeds a limit
    does not run again. Round numbers continue from phase to phase. `report` is called with the rate
    or the error of each trial.
    """

    objective: Objective
    budget: Budget
    measure: Measure
    written_bytes: Callable[[int, bool], int]
    report: Callable[[Candidate, Step, str], None]
    rng: random.Random
    trials: dict[str, RaceEntry] = field(default_factory=dict, init=False)
    number: int = field(default=0, init=False)

    def join(self, name: str, candidate: Candidate) -> RaceEntry:
        """Add `candidate`, which runs from the next round on. A name can join only once."""
        assert name not in self.trials
        self.trials[name] = RaceEntry(candidate=candidate)
        return self.trials[name]

    @property
    def running(self) -> dict[str, RaceEntry]:
        """The running contenders, by name."""
        return {name: one for name, one in self.trials.items() if one.running}

    def writer_of(self, name: str) -> str:
        """Return the writer of a contender: its family."""
        return self.trials[name].candidate.writer

    def ranked(self, names: Iterable[str] | None = None) -> list[str]:
        """Return those of `names`, or of the running contenders, with a measurement, best first.

        One standard error of its effect is added to the loss of each contender. So a contender with
        few rounds does not lead by luck in one of them.
        """
        effects, noise = self.model()
        chosen = [name for name in (self.running if names is None else names) if name in effects]
        return sorted(
            chosen, key=lambda n: effects[n] + noise / math.sqrt(len(self.trials[n].losses))
        )

    def first_of_each(self, names: Iterable[str]) -> list[str]:
        """Return the first of `names` of each family: a family is a writer with its settings."""
        first: dict[str, str] = {}
        for name in names:
            first.setdefault(self.writer_of(name), name)
        return list(first.values())

    def ratio(self, name: str, other: str) -> float | None:
        """Return the loss of `name` over that of `other`: the median over their common rounds.

        None without a common round.
        """
        found = compare_pairs(self.trials[name].losses, self.trials[other].losses)
        return found.ratio.ratio if found else None

    def estimated_ratio(self, name: str, other: str) -> float:
        """Return the loss of `name` over that of `other`, by effects: needs no common round."""
        effects, _ = self.model()
        return math.exp(effects[name] - effects[other])

    def judge(self) -> list[str]:
        """Drop the contenders that are shown worse than the leader, and return their names."""
        standing = self.ranked()
        if not standing:
            return []
        leader, (_, noise) = standing[0], self.model()
        dropped = []
        for name in standing[1:]:
            trial = self.trials[name]
            loss = compare_pairs(trial.losses, self.trials[leader].losses, least=2)
            if loss and _shown_worse(loss, noise):
                trial.running = False
                dropped.append(name)
        return dropped

    def cut(self, keep: int) -> None:
        """Drop all but the `keep` best, shown worse or not."""
        for name in self.ranked()[keep:]:
            self.trials[name].running = False

    def rung(
        self, phase: Phase, size: int, *, until: float, names: Sequence[str] | None = None
    ) -> bool:
        """Run two rounds of `names`, or of all running settings, and drop those shown worse.

        The first round is in random order, the second in the reverse order. So a storage whose
        speed drifts affects all settings alike. A round begins only if it leaves `until` of the
        race's share. Returns False if the first round could not begin.
        """
        order = list(names or self.running)
        self.rng.shuffle(order)
        for number in range(ROUNDS):
            taking_part = [n for n in reversed(order) if self.trials[n].running]
            order = taking_part
            if len(taking_part) < (2 if number else 1):
                return True
            if not self.budget.races(self.cost(taking_part, size), until=until):
                return number > 0
            self.run(phase, taking_part, size)
            self.judge()
        return True

    def run(self, phase: Phase, names: Iterable[str], size: int, *, record: bool = True) -> None:
        """Run one round: each of `names` once. With `record=False` losses do not count.

        Raises IobenchError when no setting is left in the race.
        """
        self.number += 1
        for name in names:
            measured = self.measure_one(name, Step(phase=phase, round=self.number, size_bytes=size))
            trial = self.trials[name]
            if measured.error:
                trial.fail(measured.error)
                continue
            if record:
                trial.losses[self.number] = self.objective.loss(measured)
            if over := self.objective.over(trial.of()):
                trial.fail(over)
        self._check_able()

    def by_probe(self, names: Iterable[str] | None = None) -> list[str]:
        """Return those of `names`, or of all, whose first trial had no error, the best first."""
        every = self.trials.items() if names is None else ((n, self.trials[n]) for n in names)
        first = {name: one.measured[0][1] for name, one in every if one.measured}
        found = {n: self.objective.loss(one) for n, one in first.items() if not one.error}
        return sorted(found, key=found.__getitem__)

    def cost(self, names: Sequence[str], size: int, *, verify: bool = False) -> Cost:
        """Return the expected cost of a round of `names`."""
        return Cost(
            time_s=sum(self._expected_s(name, size) for name in names),
            written_bytes=len(names) * self.written_bytes(size, verify),
        )

    def _expected_s(self, name: str, size: int) -> float:
        """Return the expected seconds by its last trial; for a new setting by the leader's."""
        entry = self.trials.get(name)
        if entry is None or not entry.measured:
            entry = self.trials[(self.ranked() or self.by_probe())[0]]
        return entry.expected_s(size)

    def measure_one(self, name: str, step: Step) -> Measurement:
        """Make one trial, charge the budget for it, and report it."""
        entry = self.trials[name]
        measured = self.measure(entry.candidate, step)
        self.budget.spend(measured)
        entry.measured.append((step, measured))
        figure = measured.error or self.objective.show(
            self.objective.loss(measured), step.size_bytes
        )
        self.report(entry.candidate, step, figure)
        return measured

    def _check_able(self) -> None:
        if not self.running:
            causes = {name: one.cause for name, one in self.trials.items() if not one.able}
            shown = "; ".join(f"{name}: {cause}" for name, cause in causes.items())
            raise IobenchError(f"no setting is left: {shown}")

    def model(self) -> tuple[dict[str, float], float]:
        """Return each contender's effect on the logarithm of its loss, and the noise."""
        return effects_and_noise({name: one.losses for name, one in self.trials.items()})


def effects_and_noise(
    losses: Mapping[str, Mapping[int, float]],
) -> tuple[dict[str, float], float]:
    """Return each contender's effect on the logarithm of its loss, and the noise around it.

    `losses` are by contender and round.
    """
    names = [name for name, one in losses.items() if one]
    rounds = sorted({number for name in names for number in losses[name]})
    if not names:
        return {}, _UNKNOWN_NOISE
    logs = np.full((len(names), len(rounds)), np.nan)
    for i, name in enumerate(names):
        for j, number in enumerate(rounds):
            if number in losses[name]:
                logs[i, j] = math.log(losses[name][number])
    rows, rest = _polish(logs)
    known = np.sort(np.abs(rest[~np.isnan(rest)]))
    free = known.size - len(names) - len(rounds) + 1
    noise = _UNKNOWN_NOISE
    if free >= _FEWEST_FREE:
        noise = max(1.4826 * float(np.median(known[-free:])), _LEAST_NOISE)
    return dict(zip(names, rows.tolist(), strict=True)), noise


def _polish(table: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rest = table.copy()
    rows = np.zeros(table.shape[0])
    for _ in range(_SWEEPS):
        rest -= _medians(rest.T)
        step = _medians(rest)
        rows += step
        rest -= step[:, None]
        if np.max(np.abs(step)) < 1e-9:
            break
    return rows, rest


def _medians(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each row without its gaps; numpy's own takes ten times as long."""
    ordered = np.sort(table, axis=1)  # gaps come last
    counts = np.count_nonzero(~np.isnan(table), axis=1)
    rows = np.arange(len(table))
    return np.asarray((ordered[rows, (counts - 1) // 2] + ordered[rows, counts // 2]) / 2)


def _shown_worse(loss: Comparison, noise: float) -> bool:
    error = noise * math.sqrt(2 / loss.ratio.samples)
    return loss.finding is Finding.BETTER and math.log(loss.ratio.ratio) > _Z * error
