"""Outcome: the result of a tuning and its confidence, for the report and the writer's file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from iobench.bench.judging.verdict import Context, Verdict, combine, judge, with_verification
from iobench.results.records import Sample
from iobench.stats.comparison import Comparison, Finding
from iobench.stats.estimates import Interval, median, median_interval
from iobench.tune.confirm import Confirmation, ConfirmedChoice
from iobench.tune.objective import Measurement, cpu_s_per_gib
from iobench.tune.race import Race
from iobench.tune.space import Candidate, Space

_SEARCHABLE = 0.07  # noise of a log: with more the race often leads to the wrong settings
_CLEARLY_WORSE = math.log(1.25)  # a writer that never came nearer is no candidate
_AT_END = ", and is the best of the last rounds; no difference shown over all rounds"
_REACH = math.log(1.15)  # other families that are this close count at least
_ERRORS = 1.5  # standard errors
_WITHIN = 0.05  # of the best: docs/autotune.md has the error rates


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One setting of the confirmation, with figures from its fresh samples only.

    `loss` is the median, `interval` its order-statistic interval. `over_baseline` is how many times
    better the setting is than the baseline, round by round; None for the baseline itself. `verdict`
    is the verdict on the samples that the objective counts; None where they are stalls.
    """

    candidate: Candidate
    samples: int
    loss: float
    interval: Interval | None
    over_baseline: Comparison | None
    cpu_s_per_gib: float | None
    memory_bytes: int | None
    paths: tuple[str, ...]
    verdict: Verdict | None
    save_s: float | None
    restore_s: float | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The whole result of a tuning. `size_bytes` is the size requested for the confirmation."""

    space: Space
    race: Race
    size_bytes: int
    confirmation: Confirmation
    verdict: ConfirmedChoice
    context: Context
    """The context in which its samples are judged; its `workload_bytes` are not used."""
    notes: tuple[str, ...]

    @property
    def chosen(self) -> Candidate:
        """The chosen setting: the one in the writer's file."""
        return self.race.trials[self.verdict.chosen].candidate

    @property
    def decided(self) -> bool:
        """Whether the chosen setting is within 5% of the best, as far as a tuning can show it.

        No other contender may be more than 5% better, and each setting one step from the chosen
        one was raced. False where samples vary by more than 7%, or where the
        confirmation contradicted the race: the race refined the wrong settings then.
        """
        return not any(self._doubts())

    @property
    def baseline(self) -> str | None:
        """The label of the baseline of the ratios; None where it failed."""
        label = self.confirmation.baseline
        return label if label in self.confirmation.able else None

    @property
    def keeps_baseline(self) -> bool:
        """Whether the answer is to keep the default: no gain over it was shown."""
        return self.verdict.chosen == self.baseline

    @property
    def left_out(self) -> list[str]:
        """The writers of the space that work here, or may, but were not confirmed."""
        confirmed = {self.race.writer_of(name) for name in self.confirmation.contenders}
        others = self.space.dimensions.keys() - confirmed
        tried: dict[str, list[bool]] = {}
        for one in self.race.trials.values():
            tried.setdefault(one.candidate.writer, []).append(one.able)
        return sorted(name for name in others if any(tried.get(name, [True])))

    @property
    def runner_up(self) -> str | None:
        """The best setting of the confirmation besides the chosen one and the baseline."""
        others = [
            one.candidate.label
            for one in self.standings()
            if one.candidate.label not in (self.verdict.chosen, self.baseline)
        ]
        return others[0] if others else None

    def standings(self) -> list[Standing]:
        """Return the confirmed settings: the chosen one, then the others, the best first."""
        found = [self._standing(name) for name in self.confirmation.able]
        return sorted(found, key=lambda one: (one.candidate.label != self.verdict.chosen, one.loss))

    def failures(self) -> dict[str, str]:
        """Return the settings that failed or exceeded a limit, with the cause."""
        ended = {name: trial.cause for name, trial in self.race.trials.items() if not trial.able}
        return ended | self.confirmation.failed

    def reasons(self) -> Iterator[str]:
        """Yield sentences that say how sure the result is."""
        chosen, verdict = self.verdict.chosen, self.verdict
        yield from self._gain()
        others = [other for other in verdict.equals if other != self.baseline]
        if others:
            shown = f"{chosen} is not shown to differ from {', '.join(others)}"
            within = f", and it is at most {100 * _WITHIN:.0f}% worse: it is written to the file"
            yield f"{shown}{within}" if self.decided else shown
        for doubt in self._doubts():
            yield f"not decided which setting is best: {doubt}"
        yield from self.notes

    def _gain(self) -> Iterator[str]:
        """Yield what the choice gained over the default, or that the default stays."""
        chosen, baseline = self.verdict.chosen, self.baseline
        if baseline is None:
            return
        name = chosen if chosen != baseline else self.runner_up
        gain = self.confirmation.compare(name, baseline) if name else None
        if gain is None:
            yield f"keep {baseline}, the default: nothing else was confirmed"
            return
        interval = gain.ratio.interval
        span = f" ({interval.low:.2f} - {interval.high:.2f})" if interval else ""
        times = f"{gain.ratio.ratio:.2f} times as good as {baseline}{span}"
        if not self.keeps_baseline:
            shown = gain.finding is Finding.BETTER
            yield f"{chosen} is {times}, the default{'' if shown else _AT_END}"
        elif gain.finding is Finding.NONE:
            yield f"keep {baseline}, the default: {name} is {times}, no difference shown"
        else:
            yield f"keep {baseline}, the default: {name} is {times}"

    def _doubts(self) -> Iterator[str]:
        """Yield why a setting that is more than 5% better may exist."""
        verdict = self.verdict
        if verdict.refuted:
            leader = self.confirmation.contenders[0]
            yield f"{leader} led the race, and the confirmation did not bear that out"
        yield from self._changes()
        if self.left_out:
            yield f"the budget did not suffice to confirm {', '.join(self.left_out)}"
        if verdict.excess > _WITHIN:
            yield f"another of those confirmed may be {100 * verdict.excess:.1f}% better"
        noise = max(self.confirmation.noise, self.confirmation.spread(verdict.chosen))
        if noise > _SEARCHABLE:
            limit = f"{100 * _SEARCHABLE:.0f}% is the most that decides"
            yield f"samples vary by {100 * noise:.1f}%, and {limit}"
        yield from self._unsearched()

    def _changes(self) -> Iterator[str]:
        """Yield which writers changed, compared with the chosen one, while it was tuned.

        Those that are clearly worse in the race, in the confirmation and at its end do not matter.
        """
        confirmation, chosen = self.confirmation, self.verdict.chosen
        if not confirmation.last:
            yield "the budget did not suffice to measure every writer again at the end"
            return
        for name in [one for one in confirmation.own_losses() if one != chosen]:
            before, at_end = confirmation.before_and_at_end(name, chosen)
            raced = self.race.ratio(name, chosen)
            logs = (raced and math.log(raced), before, at_end)
            known = [one for one in logs if one is not None]
            if (
                at_end is not None
                and max(known) - min(known) > confirmation.changed
                and min(known) < _CLEARLY_WORSE
            ):
                yield f"{name} and {chosen} did not keep their ratio from the race to the end"

    def _unsearched(self) -> Iterator[str]:
        """Yield near which settings better ones may be: of the choice, and of each other family.

        A family is out of reach where its best setting is further behind the choice than settings
        change the loss of any one writer here.
        """
        effects, noise = self.race.model()
        chosen, of_family = self.verdict.chosen, dict[str, list[str]]()
        for name in sorted(effects, key=effects.__getitem__):
            of_family.setdefault(self.race.writer_of(name), []).append(name)
        ranges = [effects[names[-1]] - effects[names[0]] for names in of_family.values()]
        reach = max(_REACH, *ranges, 0.0)
        best = {writer: names[0] for writer, names in of_family.items()}
        for name in (best | {self.chosen.writer: chosen}).values():
            behind = effects.get(name, 0.0) - effects.get(chosen, 0.0)
            if behind > reach or not self.race.trials[name].able:
                continue
            untried, gain = self._gain_near(name, effects, noise)
            if untried:
                yield f"{untried} setting{'s' * (untried > 1)} one step from {name} not tried"
            elif gain - behind > math.log1p(_WITHIN):
                percent = 100 * math.expm1(gain - behind)
                yield f"settings near {name} may be {percent:.1f}% better, all steps together"

    def _gain_near(
        self, name: str, effects: Mapping[str, float], noise: float
    ) -> tuple[int, float]:
        """Return how many settings one step from `name` were not raced, and what steps may gain.

        The gain is a logarithm: the sum over all options of the better step's upper limit, by
        effects or by common rounds. Writers that change in the race mislead one of the two.
        """
        own = self.race.trials[name].candidate
        values, untried, gains = own.options.to_dict(), 0, dict[str, float]()
        for one in self.space.neighbours(own):
            entry = self.race.trials.get(one.label)
            if entry and not entry.able:
                continue
            if entry is None or not entry.losses or name not in effects:
                untried += 1
                continue
            rounds = 1 / len(entry.losses) + 1 / len(self.race.trials[name].losses)
            gain = effects[name] - effects[one.label] + _ERRORS * noise * math.sqrt(rounds)
            if ratio := self.race.ratio(name, one.label):
                gain = max(gain, math.log(ratio))
            (option,) = (o for o, value in one.options.to_dict().items() if value != values[o])
            gains[option] = max(gain, gains.get(option, 0.0))
        return untried, sum(gains.values())

    def _standing(self, name: str) -> Standing:
        losses = list(self.confirmation.losses[name].values())
        fresh = self.race.trials[name].of("confirm")
        counted = self._counted(fresh)
        both = [one for m in fresh for one in (m.save, m.restore) if one is not None]
        every = self.race.trials[name].of()
        memory = [one.memory_bytes for one in every if one.memory_bytes is not None]
        return Standing(
            candidate=self.race.trials[name].candidate,
            samples=len(losses),
            loss=median(losses),
            interval=median_interval(losses),
            over_baseline=None
            if name == self.baseline or self.baseline is None
            else self.confirmation.compare(name, self.baseline),
            cpu_s_per_gib=median([cpu_s_per_gib(one) for one in counted]) if counted else None,
            memory_bytes=max(memory, default=None),
            paths=tuple(dict.fromkeys(path for one in both for path in one.paths)),
            verdict=combine([self._judge(one) for one in counted]) if counted else None,
            save_s=_seconds([m.save for m in fresh]),
            restore_s=_seconds([m.restore for m in fresh]),
        )

    def _counted(self, fresh: list[Measurement]) -> list[Sample]:
        """Return the samples that the objective counts, saves with the proof of a restore."""
        samples = [one for m in fresh for one in (m.save, m.restore) if one is not None]
        proved = with_verification(samples, self.context)
        return [one for one in proved if one.operation in self.race.objective.operations]

    def _judge(self, sample: Sample) -> Verdict:
        return judge(sample, replace(self.context, workload_bytes=sample.bytes))


def _seconds(samples: list[Sample | None]) -> float | None:
    found = [one.elapsed_s for one in samples if one is not None]
    return median(found) if found else None
