"""Tuner: decides which trial comes next, from the first probe to the confirmation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from iobench.bench.judging.verdict import Context
from iobench.errors import IobenchError
from iobench.stats.comparison import LEAST_FLOOR
from iobench.tune.budget import ROUNDS, SMALLER, Planner, Search, TuningSizes, plan, too_small
from iobench.tune.confirm import CLOSE, Finals
from iobench.tune.objective import Step
from iobench.tune.outcome import Outcome
from iobench.tune.race import Race
from iobench.tune.space import Candidate, Space
from iobench.units import format_seconds, format_size

_FINALISTS = 4
_MOST_DRAWN = 8
_NEAR = 1.4  # times the leader's loss: families whose best setting is refined
_BATCH = 6  # settings proposed at once
_PROBING = 0.25  # of the time

# The fraction of the race's share of the budget that must be left after each part of the race.
_AFTER_DRAWN, _AFTER_HALVING = 0.8, 0.7


class TuningProgress(Protocol):
    """Receives the progress of a tuning."""

    def phase(self, what: str) -> None:
        """Report that a phase of the tuning begins."""

    def trial(self, candidate: Candidate, step: Step, figure: str) -> None:
        """Report a measurement; `figure` is its rate or its error."""


@dataclass(kw_only=True)
class Tuner:
    """Finds the setting with the smallest loss, by an unused `race`.

    Pure, except for what the race and `progress` call. Equal measurements, bytes and random numbers
    lead to equal trials and an equal outcome.
    """

    space: Space
    race: Race
    sizes: TuningSizes
    progress: TuningProgress
    floor: float = LEAST_FLOOR
    context: Context = field(default_factory=lambda: Context(workload_bytes=0))
    notes: list[str] = field(default_factory=list, init=False)
    search: Search = field(init=False)
    _full: Search = field(init=False)

    def run(self) -> Outcome:
        """Probe, race, refine, confirm; with a smaller budget less of it.

        Raises UsageError when the budget is too small to compare the default with one other
        setting, IobenchError when every candidate fails or the confirmation could not be finished.
        """
        self._full, planned = plan(
            self.space, self.sizes, self.race.written_bytes, self.race.budget.max_bytes
        )
        self.sizes = replace(self.sizes, largest=planned.size_bytes)
        self._probe()
        self._share_out()
        if self.search.raced:
            self._known_good()
            self._drawn()
            self._refine()
        return self._confirm()

    # The phases, in order.

    def _probe(self) -> None:
        """Run one short trial of each known setting, to see whether it works and how fast it is."""
        self.progress.phase(f"{len(self.space.known)} known settings, probed")
        probe = self.sizes.probe_bytes(self.sizes.largest)
        self.race.run("probe", self._to_probe(), probe, record=False)

    def _to_probe(self) -> Iterator[str]:
        """Yield the known settings whose probe leaves the bytes of the smallest search.

        Once two settings work, probes end after a part of the time.
        """
        race, budget = self.race, self.race.budget
        planner = Planner.of_bytes(self.space, self.sizes, race.written_bytes)
        least = replace(planner, unprobed=1).least().written_bytes
        for one in self.space.known:
            late = budget.spent_s > _PROBING * budget.max_s and len(race.by_probe(race.running)) > 1
            if not late and budget.left_cost.written_bytes >= least:
                race.join(one.label, one)
                yield one.label

    def _share_out(self) -> None:
        """Choose the largest search that is affordable, and reserve its confirmation's part."""
        budget, probed = self.race.budget, self.race.by_probe(self.race.running)
        planner = Planner.of_rates(
            self.space,
            self.sizes,
            probed,
            lambda names, size, verify: self.race.cost(names, size, verify=verify),
        )
        search = planner.largest(budget.left_cost)
        if search is None:
            needed_s = budget.spent_s + planner.least().time_s
            about = f"about {format_seconds(needed_s)}"
            raise too_small("--max-time", about, self.space, self.sizes)
        self.search = search
        self._full = replace(planner.full(), size_bytes=self._full.size_bytes)
        budget.set_aside(search.reserve)

    def _smaller(self, outcome: Outcome) -> Iterator[str]:
        """Yield what the budget has left out, in one line; nothing for a full search."""
        parts = list(self.search.less_than(self._full))
        if outcome.left_out:
            parts.append(f"not confirmed: {', '.join(outcome.left_out)}")
        untried = [one.label for one in self.space.known if one.label not in self.race.trials]
        if untried:
            parts.append(f"not tried: {' '.join(untried)}")
        if parts:
            yield f"{SMALLER}{'; '.join(parts)}"

    def _known_good(self) -> None:
        self.progress.phase(
            f"race of {len(self.race.running)} known settings, "
            f"{format_size(self._race_bytes())} at a time"
        )
        self.race.rung("race", self._race_bytes(), until=0.0)

    def _drawn(self) -> None:
        """Race random settings of the writers in contention; keep half of all, then half again."""
        best = {
            writer: min(ratios)
            for writer in self.space.dimensions
            if (ratios := self._ratios_of(writer))
        }
        hopeful = [writer for writer, ratio in best.items() if ratio <= CLOSE]
        for writer, ratio in best.items():
            if writer not in hopeful:
                others = self.space.size_of(writer) - 1
                self.notes.append(
                    f"{writer}: {ratio:.1f} times the leader's loss at its best known setting; "
                    f"its {others} other settings were not tried"
                )
        count = self._affordable(until=_AFTER_DRAWN)
        count = min(_MOST_DRAWN, count - len(self.race.running))
        for one in self.space.draw(hopeful, count, self.race.trials.keys(), self.race.rng):
            self.race.join(one.label, one)
        self.progress.phase(f"race of {len(self.race.running)} settings, drawn ones among them")
        self.race.rung("race", self._race_bytes(), until=_AFTER_HALVING)
        while (running := len(self.race.running)) > _FINALISTS:
            keep = max(_FINALISTS, math.ceil(running / 2))
            self.race.cut(keep)
            if not self.race.rung("race", self._race_bytes(few=True), until=_AFTER_HALVING):
                break
        self.race.cut(2 * _FINALISTS)

    def _refine(self) -> None:
        """Race settings near the best of each close family, in batches.

        Each batch runs against the leaders and against the setting that it is near. Without the
        latter in the same rounds, a writer that became slower between the rounds would hide which
        of its settings is better.
        """
        while True:
            leaders = self.race.ranked()[:2]
            starts = list(dict.fromkeys([*leaders, *self._family_leaders()]))
            count = min(_BATCH, self._affordable(until=0.0) - len(starts))
            batch = self._near(starts, count)
            if not batch:
                return
            self.progress.phase(f"{len(batch)} settings near {', '.join(starts)}")
            for one in batch:
                self.race.join(one.label, one)
            near = {one.writer for one in batch}
            bases = [n for n in starts if self.race.writer_of(n) in near]
            for name in bases:
                self.race.trials[name].running = True
            names = list(dict.fromkeys([*leaders, *bases, *(one.label for one in batch)]))
            if not self.race.rung("refine", self._race_bytes(), until=0.0, names=names):
                return
            self.race.cut(2 * _FINALISTS)

    def _near(self, starts: Sequence[str], count: int) -> list[Candidate]:
        found: dict[str, Candidate] = {}
        for start in starts:
            for one in [
                *self.space.neighbours(self.race.trials[start].candidate),
                *self._all_steps(start),
            ]:
                if len(found) < count and one.label not in self.race.trials:
                    found.setdefault(one.label, one)
        return list(found.values())

    def _all_steps(self, start: str) -> list[Candidate]:
        """Return the setting with every step that was better than `start`, if there are several.

        Each of several steps may be too small to be seen alone (pattern move: Hooke and Jeeves,
        Direct Search, 1961).
        """
        own = self.race.trials[start].candidate
        values = own.options.to_dict()
        steps: dict[str, tuple[float, Any]] = {}
        for one in self.space.neighbours(own):
            ratio = self.race.ratio(one.label, start) if one.label in self.race.trials else None
            if ratio is None or ratio >= 1:
                continue
            for option, value in one.options.to_dict().items():
                if value != values[option] and ratio < steps.get(option, (1.0, None))[0]:
                    steps[option] = (ratio, value)
        if len(steps) < 2:
            return []
        changed = {option: value for option, (_, value) in steps.items()}
        return [Candidate.of(own.writer, values | changed, "refined")]

    def _confirm(self) -> Outcome:
        """Take fresh samples of the leader, of each close family, and of the baseline."""
        finals = Finals(space=self.space, race=self.race, search=self.search, notes=self.notes)
        confirmation = finals.run(self.floor, self.progress.phase)
        verdict = confirmation.verdict()
        if verdict is None:
            why = "; ".join(f"{name}: {cause}" for name, cause in confirmation.failed.items())
            raise IobenchError(
                "the confirmation could not be finished, so no winner is named: "
                + (why or "the budget is spent; give more --max-time or --max-bytes")
            )
        outcome = Outcome(
            space=self.space,
            race=self.race,
            size_bytes=self.search.size_bytes,
            confirmation=confirmation,
            verdict=verdict,
            context=self.context,
            notes=(),
        )
        return replace(outcome, notes=(*self._smaller(outcome), *self.notes))

    # Helpers of the phases.

    def _ratios_of(self, writer: str) -> list[float]:
        leader = self.race.ranked()[0]
        ratios = [
            self.race.ratio(name, leader)
            for name, trial in self.race.trials.items()
            if trial.candidate.writer == writer and trial.losses and trial.able
        ]
        return [ratio for ratio in ratios if ratio is not None]

    def _family_leaders(self) -> list[str]:
        """Return the best setting of each family that comes near the leader, the leader first."""
        able = (name for name, one in self.race.trials.items() if one.able)
        leader, *others = self.race.first_of_each(self.race.ranked(able))
        near = [name for name in others if self.race.estimated_ratio(name, leader) <= _NEAR]
        return [leader, *near]

    def _race_bytes(self, *, few: bool = False) -> int:
        """Return the size of a trial of the race; it is larger when few settings are left."""
        return self.sizes.race_bytes(self.search.size_bytes, few=few)

    def _affordable(self, *, until: float) -> int:
        """Return how many settings, each as fast as the leader, can run a rung of small trials.

        The rung must leave `until` of the race's share.
        """
        leader = self.race.cost(self.race.ranked()[:1], self._race_bytes())
        return self.race.budget.affordable(leader, rounds=ROUNDS, until=until)
