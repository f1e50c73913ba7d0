"""Confirmation: fresh samples of a few settings, and the choice by them. No clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from iobench.bench.judging.comparison import LEAST_FLOOR, LEAST_SAMPLES, Difference, Finding
from iobench.bench.judging.stats import Ratio, median, paired_log_ratio

__all__ = ["Confirmation", "ConfirmedChoice"]


@dataclass(frozen=True, kw_only=True)
class ConfirmedChoice:
    """The chosen setting, and the evidence for it.

    `over_baseline` is its difference from the baseline, None for the baseline itself. `equals` are
    the settings that it is not shown to be better than. `refuted` is true where the race's leader
    was shown worse than another, or was not shown better than the baseline.
    """

    chosen: str
    over_baseline: Difference | None
    equals: tuple[str, ...]
    refuted: bool


@dataclass(kw_only=True)
class Confirmation:
    """Losses by contender and round. The first of `contenders` led the race.

    The baseline is a contender too. It is chosen unless another contender is shown better.
    """

    contenders: list[str]
    baseline: str
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    eliminated: set[str] = field(default_factory=set)
    """Contenders that the first look showed clearly worse: not run again, and not chosen."""

    def join(self, names: Iterable[str]) -> None:
        """Add `names` as contenders from the next round on."""
        self.contenders += names

    def eliminate(self, name: str) -> None:
        """Eliminate `name`: it is not run again."""
        self.eliminated.add(name)

    def record(self, name: str, number: int, loss: float) -> None:
        self.losses.setdefault(name, {})[number] = loss

    def fail(self, name: str, cause: str) -> None:
        """Record that `name` failed, and why: it is not run again, and not chosen."""
        self.failed[name] = cause

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

    def compare(self, name: str, other: str) -> Difference | None:
        """Return how many times better `name` is than `other`; None without a common round."""
        mine, others = self.losses.get(name, {}), self.losses.get(other, {})
        both = sorted(mine.keys() & others.keys())
        if not both:
            return None
        ratio: Ratio = paired_log_ratio([1 / mine[r] for r in both], [1 / others[r] for r in both])
        return Difference(ratio=ratio, floor=LEAST_FLOOR)

    def verdict(self) -> ConfirmedChoice | None:
        """Return the choice that the samples support; None when there are too few of them."""
        if not self.enough:
            return None
        able = self.able
        chosen = max(self.unbeaten or able, key=self._merit)
        baseline = self.baseline if self.baseline in able else None
        if baseline and chosen != baseline and not self._better(chosen, baseline):
            chosen = baseline
        leader = self.contenders[0]
        return ConfirmedChoice(
            chosen=chosen,
            over_baseline=None
            if baseline in (None, chosen)
            else self.compare(chosen, self.baseline),
            equals=tuple(
                name for name in able if name != chosen and not self._better(chosen, name)
            ),
            refuted=leader in self.failed
            or leader in self.eliminated
            or (
                leader != chosen
                and (chosen == baseline or self._finding(leader, chosen) is Finding.WORSE)
            ),
        )

    def _merit(self, name: str) -> float:
        """Return the median over rounds of how much less it lost than the others together."""
        mine = self.losses[name]
        able = self.able
        logs = []
        for number, loss in mine.items():
            others = [self.losses[one][number] for one in able if number in self.losses[one]]
            logs.append(sum(math.log(other / loss) for other in others) / len(others))
        return median(logs)

    def _better(self, name: str, other: str) -> bool:
        return self._finding(name, other) is Finding.BETTER

    def _finding(self, name: str, other: str) -> Finding:
        difference = self.compare(name, other) if name != other else None
        return difference.finding if difference else Finding.NONE
