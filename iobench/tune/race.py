"""Race: who is dropped, given what was measured. No clock, no I/O, no randomness.

Losses are positive and smaller is better (seconds). In each round those still running are measured
next to each other, so losses compare within a round. A contender is dropped when it is *shown*
worse than the leader, by two conditions that must both hold:

- the sign test's interval of its paired log ratios to the leader lies beyond the noise floor: of
  few rounds that asks for every single one, and no outlier in one round can do it
- the median of those ratios is `_Z` standard errors above zero, with the noise pooled over all
  contenders: two rounds of twenty contenders tell the noise well, those of two contenders do not

The noise is what remains after the effects of contenders and rounds are taken out by median polish
(Tukey, Exploratory Data Analysis, 1977, chapter 11), as 1.4826 MAD, which tails do not move.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from iobench.bench.judging.comparison import LEAST_FLOOR
from iobench.bench.judging.stats import median, median_interval

__all__ = ["Race", "RaceEntry", "RaceStatus", "effects_and_noise"]

_Z = 3.5  # the leader is the best of many, by luck too; measured in docs/autotune.md
_UNKNOWN_NOISE = 0.10  # of a log, while too few rounds have been run to tell
_LEAST_NOISE = 0.01
_FEWEST_FREE = 4  # degrees of freedom from which the noise is believed
_SWEEPS = 20

T = TypeVar("T")


class RaceStatus(StrEnum):
    """What became of a contender."""

    RUNNING = "running"
    DROPPED = "shown worse"
    CUT = "left behind"
    OVER = "over a limit"
    FAILED = "failed"


@dataclass(kw_only=True)
class RaceEntry(Generic[T]):
    """One contender of a race: its loss in each round that it took part in, and its fate."""

    candidate: T
    losses: dict[int, float] = field(default_factory=dict)
    status: RaceStatus = RaceStatus.RUNNING
    cause: str = ""

    @property
    def running(self) -> bool:
        return self.status is RaceStatus.RUNNING

    @property
    def able(self) -> bool:
        """Whether it has done what it must so far, however slowly."""
        return self.status not in (RaceStatus.FAILED, RaceStatus.OVER)

    def end(self, status: RaceStatus, cause: str) -> None:
        """It runs no more."""
        self.status, self.cause = status, cause


class Race(Generic[T]):
    """Contenders by name, in the order in which they joined."""

    def __init__(self) -> None:
        self.trials: dict[str, RaceEntry[T]] = {}

    def join(self, name: str, candidate: T) -> RaceEntry[T]:
        """`candidate` runs from the next round on. One name joins once."""
        assert name not in self.trials
        self.trials[name] = RaceEntry(candidate=candidate)
        return self.trials[name]

    @property
    def running(self) -> dict[str, RaceEntry[T]]:
        """Those that still run, by name."""
        return {name: one for name, one in self.trials.items() if one.running}

    def ranked(self, names: Iterable[str] | None = None) -> list[str]:
        """Of `names`, or of those running, who was measured at all, the best first.

        Who has run few rounds must be better by so much more: by one standard error of its effect,
        so that luck in one round leads nobody.
        """
        effects, noise = self._model()
        chosen = [name for name in (self.running if names is None else names) if name in effects]
        return sorted(chosen, key=lambda name: self._cautious(name, effects, noise))

    def ratio(self, name: str, other: str) -> float | None:
        """How many times the loss of `other`: the median over the rounds of both, None of none."""
        logs = self._paired_logs(name, other)
        return math.exp(median(logs)) if logs else None

    def estimated_ratio(self, name: str, other: str) -> float:
        """Return how many times the loss of `other`, by effects: they need no round in common."""
        effects, _ = self._model()
        return math.exp(effects[name] - effects[other])

    def judge(self) -> list[str]:
        """Drop whoever is shown worse than the leader; their names."""
        standing = self.ranked()
        if not standing:
            return []
        leader, (_, noise) = standing[0], self._model()
        dropped = []
        for name in standing[1:]:
            logs = self._paired_logs(name, leader)
            if _shown_worse(logs, noise):
                times = math.exp(median(logs))
                self.trials[name].end(
                    RaceStatus.DROPPED,
                    f"{times:.2f} times the loss of {leader} in {len(logs)} rounds",
                )
                dropped.append(name)
        return dropped

    def cut(self, keep: int, why: str) -> list[str]:
        """Leave all but the `keep` best behind, shown worse or not; their names."""
        behind = self.ranked()[keep:]
        for name in behind:
            self.trials[name].end(RaceStatus.CUT, why)
        return behind

    def _paired_logs(self, name: str, other: str) -> list[float]:
        mine, others = self.trials[name].losses, self.trials[other].losses
        return [math.log(mine[r] / others[r]) for r in sorted(mine.keys() & others.keys())]

    def _cautious(self, name: str, effects: dict[str, float], noise: float) -> float:
        return effects[name] + noise / math.sqrt(len(self.trials[name].losses))

    def _model(self) -> tuple[dict[str, float], float]:
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
    known = rest[~np.isnan(rest)]
    free = known.size - len(names) - len(rounds) + 1
    noise = _UNKNOWN_NOISE
    if free >= _FEWEST_FREE:
        spread = 1.4826 * float(np.median(np.abs(known)))
        noise = max(spread * math.sqrt(known.size / free), _LEAST_NOISE)
    return dict(zip(names, rows.tolist(), strict=True)), noise


def _polish(table: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Row effects and residuals of a table with gaps, columns taken out first."""
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
    """The median of each row, gaps left out; numpy's own takes ten times as long."""
    ordered = np.sort(table, axis=1)  # gaps come last
    counts = np.count_nonzero(~np.isnan(table), axis=1)
    rows = np.arange(len(table))
    return np.asarray((ordered[rows, (counts - 1) // 2] + ordered[rows, counts // 2]) / 2)


def _shown_worse(logs: list[float], noise: float) -> bool:
    if len(logs) < 2:
        return False
    interval = median_interval(logs)
    assert interval is not None
    error = noise * math.sqrt(2 / len(logs))
    return interval.low > math.log1p(LEAST_FLOOR) and median(logs) > _Z * error
