"""Race: decides from the measurements which contenders are dropped. No clock, I/O or randomness.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from iobench.stats.comparison import Comparison, Finding, compare_pairs

_Z = 3.5  # high, because the best of many leads partly by luck; measured in docs/autotune.md
_UNKNOWN_NOISE = 0.10  # of a log, while too few rounds have been run to estimate it
_LEAST_NOISE = 0.01
_FEWEST_FREE = 4  # degrees of freedom that an estimate of the noise needs
_SWEEPS = 20

T = TypeVar("T")


class RaceStatus(StrEnum):
    """Status of a contender in the race."""

    RUNNING = "remaining"
    DROPPED = "shown worse"
    CUT = "eliminated"
    OVER = "over a limit"
    FAILED = "failed"


@dataclass(kw_only=True)
class RaceEntry(Generic[T]):
    """One contender of a race: its loss in each of its rounds, and its status."""

    candidate: T
    losses: dict[int, float] = field(default_factory=dict)
    status: RaceStatus = RaceStatus.RUNNING
    cause: str = ""

    @property
    def running(self) -> bool:
        return self.status is RaceStatus.RUNNING

    @property
    def able(self) -> bool:
        """Whether it has neither failed nor exceeded a limit, however slow it is."""
        return self.status not in (RaceStatus.FAILED, RaceStatus.OVER)

    def end(self, status: RaceStatus, cause: str) -> None:
        """Set the final status: the contender does not run again."""
        self.status, self.cause = status, cause

    def run_again(self) -> None:
        """Let an able contender that was dropped or cut run again."""
        assert self.able
        self.status, self.cause = RaceStatus.RUNNING, ""


class Race(Generic[T]):
    """Contenders by name, in the order in which they joined."""

    def __init__(self) -> None:
        self.trials: dict[str, RaceEntry[T]] = {}

    def join(self, name: str, candidate: T) -> RaceEntry[T]:
        """Add `candidate`, which runs from the next round on. A name can join only once."""
        assert name not in self.trials
        self.trials[name] = RaceEntry(candidate=candidate)
        return self.trials[name]

    @property
    def running(self) -> dict[str, RaceEntry[T]]:
        """The running contenders, by name."""
        return {name: one for name, one in self.trials.items() if one.running}

    def ranked(self, names: Iterable[str] | None = None) -> list[str]:
        """Return those of `names`, or of the running contenders, with a measurement, best first.

        One standard error of its effect is added to the loss of each contender. So a contender with
        few rounds does not lead by luck in one of them.
        """
        effects, noise = self._model()
        chosen = [name for name in (self.running if names is None else names) if name in effects]
        return sorted(chosen, key=lambda name: self._cautious(name, effects, noise))

    def ratio(self, name: str, other: str) -> float | None:
        """Return the loss of `name` over that of `other`: the median over their common rounds.

        None without a common round.
        """
        found = compare_pairs(self.trials[name].losses, self.trials[other].losses)
        return found.ratio.ratio if found else None

    def estimated_ratio(self, name: str, other: str) -> float:
        """Return the loss of `name` over that of `other`, by effects: needs no common round."""
        effects, _ = self._model()
        return math.exp(effects[name] - effects[other])

    def judge(self) -> list[str]:
        """Drop the contenders that are shown worse than the leader, and return their names."""
        standing = self.ranked()
        if not standing:
            return []
        leader, (_, noise) = standing[0], self._model()
        dropped = []
        for name in standing[1:]:
            trial = self.trials[name]
            loss = compare_pairs(trial.losses, self.trials[leader].losses, least=2)
            if loss and _shown_worse(loss, noise):
                trial.end(
                    RaceStatus.DROPPED,
                    f"{loss.ratio.ratio:.2f} times the loss of {leader} in "
                    f"{loss.ratio.samples} rounds",
                )
                dropped.append(name)
        return dropped

    def cut(self, keep: int, why: str) -> list[str]:
        """Cut all but the `keep` best, shown worse or not, and return the names of those cut."""
        behind = self.ranked()[keep:]
        for name in behind:
            self.trials[name].end(RaceStatus.CUT, why)
        return behind

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
    known = np.sort(np.abs(rest[~np.isnan(rest)]))
    free = known.size - len(names) - len(rounds) + 1
    noise = _UNKNOWN_NOISE
    if free >= _FEWEST_FREE:
        noise = max(1.4826 * float(np.median(known[-free:])), _LEAST_NOISE)
    return dict(zip(names, rows.tolist(), strict=True)), noise


def _polish(table: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return row effects and residuals of a table with gaps; column effects are removed first."""
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
    """Return whether a loss is shown higher than the leader's."""
    error = noise * math.sqrt(2 / loss.ratio.samples)
    return loss.finding is Finding.BETTER and math.log(loss.ratio.ratio) > _Z * error
