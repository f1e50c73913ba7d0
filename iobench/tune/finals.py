"""Finals: the rounds of a confirmation, with a first look at every close family of settings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from iobench.stats.comparison import LEAST_FLOOR, LEAST_SAMPLES
from iobench.stats.estimates import median
from iobench.tune.budget import Budget, Cost
from iobench.tune.confirm import Confirmation
from iobench.tune.race import Race
from iobench.tune.rounds import Rounds, TuningProgress
from iobench.tune.search import LAST_ROUNDS, LOOK_ROUNDS, Search, TuningSizes
from iobench.tune.space import Candidate, Space
from iobench.units import format_size

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
    race: Race[Candidate]
    rounds: Rounds
    budget: Budget
    sizes: TuningSizes
    search: Search
    progress: TuningProgress
    rng: random.Random
    floor: float = LEAST_FLOOR
    notes: list[str] = field(default_factory=list)
    _order: list[str] = field(default_factory=list, init=False)

    def run(self) -> Confirmation:
        """Run rounds until every contender has enough samples or the budget is spent."""
        contenders, baseline = self.contenders(), self.space.baseline
        if self.space.reference:
            self.race.join(baseline.label, baseline)
        measured = self.space.reference or baseline.label in contenders
        confirmation = Confirmation(
            contenders=contenders, baseline=baseline.label if measured else "", floor=self.floor
        )
        names = [*contenders, *confirmation.compared]
        self.progress.phase(
            f"confirmation of {', '.join(names)}, {format_size(self.sizes.confirm)} at a time"
        )
        for number in range(LOOK_ROUNDS):
            if not self._round(confirmation, number):
                return confirmation
        if not confirmation.able:
            return confirmation
        self._eliminate(confirmation)
        self._bring_back(confirmation)
        for number in range(LOOK_ROUNDS, _MOST_ROUNDS):
            if not self._round(confirmation, number, then=self._last(confirmation)):
                break
        last = self._last(confirmation)
        if not self.budget.confirms(self._cost_of_last(last), enough=False):
            return confirmation
        for _ in range(LAST_ROUNDS):
            self.rng.shuffle(last)
            self.rounds.confirm(confirmation, last, self.sizes.confirm, verify=())
            confirmation.last.append(self.rounds.number)
        return confirmation

    def _last(self, confirmation: Confirmation) -> list[str]:
        """Return what the last rounds measure: the best setting of each family."""
        able = [name for name in confirmation.able if name in confirmation.losses]
        others = [name for name in confirmation.eliminated if name in confirmation.losses]
        best: dict[str, str] = {}
        for names in (able, others):
            for name in sorted(names, key=confirmation.middle):
                best.setdefault(self._writer(name), name)
        return list(best.values())

    def _cost_of_last(self, names: Sequence[str]) -> Cost:
        return self.rounds.cost([*names] * LAST_ROUNDS, self.sizes.confirm)

    def contenders(self) -> list[str]:
        """Return leader, default, best of each family, runner-up, and best known settings.

        The best known settings are that of the leader's family and that of all. The search limits
        how many there are: the first ones.
        """
        able = {name: one.candidate for name, one in self.race.trials.items() if one.able}
        known = self.rounds.by_probe(name for name, one in able.items() if one.well_known)
        best_known = self.race.ranked(known) or known
        leader, *others = self.race.ranked() or known
        chosen = [leader]
        if self.space.baseline.label in able:
            chosen.append(self.space.baseline.label)
        chosen += self._family_leaders()
        chosen += others[:1]
        chosen += [name for name in best_known if self._writer(name) == self._writer(leader)][:1]
        chosen += best_known[:1]
        return list(dict.fromkeys(chosen))[: self.search.contenders - bool(self.space.reference)]

    def _family_leaders(self) -> list[str]:
        """Return the best setting of each family, the best family first; dropped ones too."""
        able = [name for name, one in self.race.trials.items() if one.able]
        best: dict[str, str] = {}
        for name in [*self.race.ranked(able), *self.rounds.by_probe(able)]:
            best.setdefault(self._writer(name), name)
        return list(best.values())

    def _of_family(self, writer: str) -> list[str]:
        """Return the measured settings of a writer, best first, including eliminated ones."""
        return self.race.ranked(
            name
            for name, one in self.race.trials.items()
            if one.candidate.writer == writer and one.able and one.losses
        )

    def _round(self, confirmation: Confirmation, number: int, *, then: Sequence[str] = ()) -> bool:
        """Run a round of the open contenders; False where it and the last rounds do not fit.

        The last rounds do not count until there are enough samples: those come first.
        """
        able = confirmation.open
        if not able:
            return False
        able = [*able, *confirmation.compared]
        fresh = [name for name in able if name not in confirmation.losses]
        cost = self.rounds.cost(able, self.sizes.confirm, verify=bool(fresh))
        if confirmation.enough:
            cost = cost.plus(self._cost_of_last(then))
        if not self.budget.confirms(cost, enough=confirmation.enough):
            return False
        if number % 2 == 0:
            self.rng.shuffle(able)
            self._order = able
        order = able if number % 2 == 0 else [*reversed(self._order)]
        taking_part = [name for name in order if name in able]
        taking_part += [name for name in able if name not in taking_part]
        self.rounds.confirm(confirmation, taking_part, self.sizes.confirm, verify=fresh)
        return True

    def _eliminate(self, confirmation: Confirmation) -> None:
        """Eliminate settings that are clearly worse than the best in every round, or too many.

        At most as many as the search says stay, the baseline among them, and fewer where the bytes
        that are left do not suffice for them.
        """
        ranked = self._ranked(confirmation)
        affordable = self._affordable(confirmation, LEAST_SAMPLES - LOOK_ROUNDS)
        staying = min(self.search.staying, max(2, affordable))
        for place, name in enumerate(one for one in ranked if one != confirmation.baseline):
            worse = min(self._times(confirmation, name, ranked[0])) > _CLEARLY_WORSE
            if worse or place >= staying - 1:
                confirmation.eliminate(name)

    def _bring_back(self, confirmation: Confirmation) -> None:
        """Add settings of the best family where the race's leader is of another, worse family."""
        leader, best = confirmation.contenders[0], self._ranked(confirmation)[0]
        if self._writer(best) == self._writer(leader):
            return
        times = self._times(confirmation, leader, best)
        if leader not in confirmation.failed and min(times) < _CONTRADICTED:
            return
        for name in self._ranked(confirmation)[1:]:
            if name != confirmation.baseline:
                confirmation.eliminate(name)
        back = [
            name
            for name in self._of_family(self._writer(best))
            if name not in confirmation.contenders
        ][
            : max(
                0,
                self._affordable(confirmation, LEAST_SAMPLES) - len(confirmation.able),
            )
        ]
        worse = f"{median(times):.2f} times the loss of {best}" if times else "not able"
        self.notes.append(
            f"{leader} led the race, and was {worse} in the confirmation; brought back: "
            f"{', '.join(back) or 'none'}"
        )
        confirmation.join(back)

    def _affordable(self, confirmation: Confirmation, rounds: int) -> int:
        """Return how many settings can run `rounds` rounds with the bytes that are left."""
        one = self.rounds.cost(confirmation.contenders[:1], self.sizes.confirm, verify=True)
        last = self._cost_of_last(self._last(confirmation)).written_bytes
        return max(0, self.budget.left_bytes - last) // (rounds * one.written_bytes)

    def _ranked(self, confirmation: Confirmation) -> list[str]:
        """Return the able contenders by median loss, the smallest first."""
        return sorted(confirmation.able, key=confirmation.middle)

    def _times(self, confirmation: Confirmation, name: str, best: str) -> Sequence[float]:
        mine, others = (confirmation.losses.get(one, {}) for one in (name, best))
        return [mine[number] / others[number] for number in mine.keys() & others.keys()]

    def _writer(self, name: str) -> str:
        return self.race.trials[name].candidate.writer
