"""Confirmation: fresh samples of a few settings, and the choice by them. No clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from iobench.stats.comparison import LEAST_FLOOR, LEAST_SAMPLES, Comparison, Finding, compare_pairs
from iobench.stats.estimates import ENOUGH_SAMPLES, huber_mean, median, paired_logs
from iobench.tune.budget import LAST_ROUNDS, LOOK_ROUNDS, Cost, Search
from iobench.tune.objective import Step
from iobench.tune.race import Race, effects_and_noise
from iobench.tune.space import Space
from iobench.units import format_size

_CHANGED, _CHANGED_ERRORS = 0.10, 3.0  # of a logarithm; standard errors of two rounds' median
_LIMIT = 1.96  # standard errors: normal noise stays below in 97.5% of all cases


@dataclass(frozen=True, kw_only=True)
class ConfirmedChoice:
    """The chosen setting, and the evidence for it.

    `over_baseline` is its difference from the baseline, None for the baseline itself. `equals` are
    the settings that it is not shown to be better than. `refuted` is true where the race's leader
    was shown worse than the choice. `excess` is the
    fraction by which its loss may exceed that of any other contender, see `Confirmation.excess`.
    """

    chosen: str
    over_baseline: Comparison | None
    equals: tuple[str, ...]
    refuted: bool
    excess: float


@dataclass(kw_only=True)
class Confirmation:
    """Losses by contender and round. The first of `contenders` led the race.

    The baseline is chosen unless another contender is shown better. It is "" where it failed.
    """

    contenders: list[str]
    baseline: str
    floor: float = LEAST_FLOOR
    """The part up to which a difference is noise."""
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Contenders that failed, and why: not run again, and not chosen."""
    last: list[int] = field(default_factory=list)
    """The numbers of the last rounds, which the best of each family took part in."""
    eliminated: set[str] = field(default_factory=set)
    """Contenders that the first look showed clearly worse: not run again, and not chosen."""

    def record(self, name: str, number: int, loss: float) -> None:
        self.losses.setdefault(name, {})[number] = loss

    @property
    def able(self) -> list[str]:
        """The contenders that still take part: not failed, not eliminated."""
        out = self.failed.keys() | self.eliminated
        return [name for name in self.contenders if name not in out]

    @property
    def enough(self) -> bool:
        """Whether every able contender has the samples that a claim needs."""
        able = self.able
        return bool(able) and all(len(self.losses.get(n, {})) >= LEAST_SAMPLES for n in able)

    @property
    def unbeaten(self) -> list[str]:
        """The able contenders that no other is shown better than."""
        able = self.able
        return [name for name in able if not any(self._better(other, name) for other in able)]

    @property
    def open(self) -> list[str]:
        """The able contenders that need more rounds; none where only one would be left.

        With enough samples of all, those that are shown worse than another need no more.
        """
        if min((len(self.losses.get(one, {})) for one in self.able), default=0) < ENOUGH_SAMPLES:
            return self.able
        unbeaten = self.unbeaten
        return unbeaten if len(unbeaten) > 1 else []

    def compare(self, name: str, other: str) -> Comparison | None:
        """Return how many times better `name` is than `other`; None without a common round."""
        losses = self.losses  # the smaller one is better
        return compare_pairs(losses.get(other, {}), losses.get(name, {}), self.floor)

    def verdict(self) -> ConfirmedChoice | None:
        """Return the choice that the samples support; None when there are too few of them."""
        if not self.enough:
            return None
        able = self.able
        chosen = min(self.unbeaten or able, key=self.excess)
        baseline = self.baseline if self.baseline in able else None
        if baseline and chosen != baseline and not self._better(chosen, baseline):
            chosen = baseline
        overtaken = self._overtaken(chosen)
        if overtaken:
            chosen = overtaken
            self.eliminated.discard(chosen)
            able = self.able
        leader = self.contenders[0]
        return ConfirmedChoice(
            chosen=chosen,
            excess=self.excess(chosen),
            over_baseline=None
            if chosen == self.baseline or self.baseline in self.failed
            else self.compare(chosen, self.baseline),
            equals=tuple(
                name for name in able if name != chosen and not self._better(chosen, name)
            ),
            refuted=overtaken is not None
            or leader in self.failed
            or leader in self.eliminated
            or self._finding(leader, chosen) is Finding.WORSE,
        )

    def own_losses(self) -> dict[str, dict[int, float]]:
        """Return the losses of contenders that have not failed, eliminated ones too."""
        names = [name for name in self.contenders if name not in self.failed]
        return {name: self.losses[name] for name in names if name in self.losses}

    def ranked(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` with a sample by their median loss, the best first."""
        middles = {n: median([*self.losses[n].values()]) for n in names if n in self.losses}
        return sorted(middles, key=middles.__getitem__)

    def ratios(self, name: str, other: str) -> list[float]:
        """Return the losses of `name` over those of `other`, in their common rounds."""
        mine, others = (self.losses.get(one, {}) for one in (name, other))
        return [mine[number] / others[number] for number in mine.keys() & others.keys()]

    def best_at_end(self) -> str | None:
        """Return the contender with the smallest loss in the last rounds; None without them."""
        sums = {
            name: [math.log(one[number]) for number in self.last]
            for name, one in self.own_losses().items()
            if self.last and one.keys() >= set(self.last)
        }
        return min(sums, key=lambda name: sum(sums[name])) if sums else None

    def before_and_at_end(self, name: str, other: str) -> tuple[float | None, float | None]:
        """Return the logarithm of the loss of `name` over that of `other`, before and at the end.

        Medians over their common rounds: all but the last rounds, and those. None without any.
        """
        parts = [
            {n: loss for n, loss in self.losses[name].items() if (n in self.last) is at_end}
            for at_end in (False, True)
        ]
        logs = [paired_logs(part, self.losses[other]) for part in parts]
        before, after = (median(one) if one else None for one in logs)
        return before, after

    def _overtaken(self, chosen: str) -> str | None:
        """Return the best of the last rounds where it is clearly better than `chosen` there."""
        best = self.best_at_end()
        if best in (None, chosen):
            return None
        assert best is not None
        at_end = self.before_and_at_end(chosen, best)[1]
        return best if at_end is not None and at_end > self.changed else None

    @property
    def changed(self) -> float:
        """The least change of a logarithm that noise does not explain."""
        return max(_CHANGED, _CHANGED_ERRORS * self.noise, math.log1p(self.floor))

    @property
    def noise(self) -> float:
        """The standard deviation of the samples of one contender, as a fraction."""
        return effects_and_noise(self.losses)[1]

    def spread(self, name: str) -> float:
        """Return the standard deviation of one sample, from the pairs of `name` with the others.

        Unlike `noise` it counts outliers in full. Where many samples are outliers, the limit of
        `excess` is too low.
        """
        others = [
            paired_logs(self.losses[name], self.losses[one]) for one in self.able if one != name
        ]
        free = sum(len(logs) - 1 for logs in others)
        squares = sum(float(np.var(logs)) * len(logs) for logs in others if logs)
        return math.sqrt(squares / (2 * free)) if free > 0 else 0.0

    def excess(self, name: str) -> float:
        """Return the fraction by which the loss of `name` may exceed that of any other contender.

        An upper limit, which holds in 97.5% of all cases for each other contender. The estimate is
        Huber's mean of the paired log ratios. Its error comes from the noise of all contenders.
        """
        noise, most = self.noise, -math.inf
        for other in self.own_losses().keys() - {name}:
            logs = paired_logs(self.losses[name], self.losses[other])
            if logs:
                error = noise * math.sqrt(2 / len(logs))
                most = max(most, huber_mean(logs) + _LIMIT * error)
        return math.expm1(most)

    def _better(self, name: str, other: str) -> bool:
        return self._finding(name, other) is Finding.BETTER

    def _finding(self, name: str, other: str) -> Finding:
        difference = self.compare(name, other) if name != other else None
        return difference.finding if difference else Finding.NONE


CLOSE = 2.0
"""A writer whose loss is at most this many times the leader's is a family that may still win."""
_CLEARLY_WORSE = 1.25  # times the best, in every round of the look
_CONTRADICTED = 1.10  # the race's leader, of another family than the best
_MOST_ROUNDS = 20


@dataclass(kw_only=True)
class Finals:
    """Confirms the race's leader next to the best setting of each family.

    A family is a writer with all its settings. The race runs earlier and at smaller sizes, so its
    order may not hold. Nor may that of the first look: writers become slower together, for example
    when a cache of the device is full. So every family is measured again in the last rounds. Where
    the look contradicts the order of the race, settings of the better family that the race had
    dropped take part again.
    """

    space: Space
    race: Race
    search: Search
    confirmation: Confirmation = field(init=False)
    notes: list[str] = field(default_factory=list)
    _order: list[str] = field(default_factory=list, init=False)

    def run(self, floor: float, phase: Callable[[str], None]) -> Confirmation:
        """Run rounds until every contender has enough samples or the budget is spent."""
        contenders, baseline = self._contenders(), self.space.baseline.label
        self.confirmation = confirmation = Confirmation(
            contenders=contenders, baseline=baseline if baseline in contenders else "", floor=floor
        )
        size = self.search.size_bytes
        phase(f"confirmation of {', '.join(contenders)}, {format_size(size)} at a time")
        for number in range(LOOK_ROUNDS):
            if not self._round(number):
                return confirmation
        if not confirmation.able:
            return confirmation
        self._eliminate()
        self._bring_back()
        for number in range(LOOK_ROUNDS, _MOST_ROUNDS):
            if not self._round(number, then=self._last()):
                break
        last = self._last()
        if not self.race.budget.confirms(self._cost_of_last(last), enough=False):
            return confirmation
        for _ in range(LAST_ROUNDS):
            self.race.rng.shuffle(last)
            confirm(self.race, confirmation, last, size)
            confirmation.last.append(self.race.number)
        return confirmation

    def _contenders(self) -> list[str]:
        """Return leader, default, best of each family, runner-up, and best known settings.

        The best known settings are that of the leader's family and that of all. The search limits
        how many there are: the first ones.
        """
        able = {name: one.candidate for name, one in self.race.trials.items() if one.able}
        known = self.race.by_probe(name for name, one in able.items() if one.well_known)
        best_known = self.race.ranked(known) or known
        leader, *others = self.race.ranked() or known
        chosen = [leader]
        if self.space.baseline.label in able:
            chosen.append(self.space.baseline.label)
        chosen += self.race.first_of_each([*self.race.ranked(able), *self.race.by_probe(able)])
        chosen += others[:1]
        chosen += [
            name for name in best_known if self.race.writer_of(name) == self.race.writer_of(leader)
        ][:1]
        chosen += best_known[:1]
        return list(dict.fromkeys(chosen))[: self.search.contenders]

    def _last(self) -> list[str]:
        """Return what the last rounds measure: the best setting of each family."""
        able = self.confirmation.ranked(self.confirmation.able)
        return self.race.first_of_each(
            [*able, *self.confirmation.ranked(self.confirmation.eliminated)]
        )

    def _cost_of_last(self, names: Sequence[str]) -> Cost:
        return self.race.cost([*names] * LAST_ROUNDS, self.search.size_bytes)

    def _round(self, number: int, *, then: Sequence[str] = ()) -> bool:
        """Run a round of the open contenders; False where it and the last rounds do not fit.

        The last rounds do not count until there are enough samples: those come first.
        """
        confirmation = self.confirmation
        able = confirmation.open
        if not able:
            return False
        fresh = [name for name in able if name not in confirmation.losses]
        cost = self.race.cost(able, self.search.size_bytes, verify=bool(fresh))
        if confirmation.enough:
            cost = cost.plus(self._cost_of_last(then))
        if not self.race.budget.confirms(cost, enough=confirmation.enough):
            return False
        if number % 2 == 0:
            self.race.rng.shuffle(able)
            self._order = able
        order = able if number % 2 == 0 else [*reversed(self._order)]
        taking_part = [name for name in order if name in able]
        taking_part += [name for name in able if name not in taking_part]
        confirm(self.race, confirmation, taking_part, self.search.size_bytes, verify=fresh)
        return True

    def _eliminate(self) -> None:
        """Eliminate settings that are clearly worse than the best in every round, or too many.

        At most as many as the search says stay, the baseline among them, and fewer where the bytes
        that are left do not suffice for them.
        """
        confirmation = self.confirmation
        ranked = confirmation.ranked(confirmation.able)
        staying = min(self.search.staying, max(2, self._affordable(LEAST_SAMPLES - LOOK_ROUNDS)))
        for place, name in enumerate(one for one in ranked if one != confirmation.baseline):
            worse = min(confirmation.ratios(name, ranked[0])) > _CLEARLY_WORSE
            if worse or place >= staying - 1:
                confirmation.eliminated.add(name)

    def _bring_back(self) -> None:
        """Add settings of the best family where the race's leader is of another, worse family."""
        confirmation = self.confirmation
        leader = confirmation.contenders[0]
        best, *others = confirmation.ranked(confirmation.able)
        if self.race.writer_of(best) == self.race.writer_of(leader):
            return
        times = confirmation.ratios(leader, best)
        if leader not in confirmation.failed and min(times) < _CONTRADICTED:
            return
        confirmation.eliminated.update(name for name in others if name != confirmation.baseline)
        family = self.race.ranked(
            name
            for name, one in self.race.trials.items()
            if one.able and self.race.writer_of(name) == self.race.writer_of(best)
        )
        back = [name for name in family if name not in confirmation.contenders]
        back = back[: max(0, self._affordable(LEAST_SAMPLES) - len(confirmation.able))]
        worse = f"{median(times):.2f} times the loss of {best}" if times else "not able"
        self.notes.append(
            f"{leader} led the race, and was {worse} in the confirmation; brought back: "
            f"{', '.join(back) or 'none'}"
        )
        confirmation.contenders += back

    def _affordable(self, rounds: int) -> int:
        one = self.race.cost(self.confirmation.contenders[:1], self.search.size_bytes, verify=True)
        left = self.race.budget.left_cost.plus(self._cost_of_last(self._last()), times=-1)
        return max(0, left.written_bytes) // (rounds * one.written_bytes)


def confirm(
    race: Race,
    confirmation: Confirmation,
    names: Sequence[str],
    size: int,
    *,
    verify: Collection[str] = (),
) -> None:
    """Run one round of the confirmation: each of `names` once; `verify` are also compared."""
    race.number += 1
    for name in names:
        step = Step(phase="confirm", round=race.number, size_bytes=size, verify=name in verify)
        measured = race.measure_one(name, step)
        why = measured.error or race.objective.over(race.trials[name].of("confirm"))
        if why:
            confirmation.failed[name] = why
        else:
            confirmation.record(name, race.number, race.objective.loss(measured))
