"""Refine: new settings of one writer, proposed by optuna (extra `tune`) from the measurements."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Collection
from typing import Any

from iobench.tune.candidate import Candidate
from iobench.tune.space import Space

__all__ = ["MISSING", "Refiner", "optuna_missing"]

MISSING = (
    "optuna is not installed, so only settings one step from a leader were tried near it; "
    "pip install 'iobench[tune]'"
)
_TRIES = 30  # most proposals at once, known ones among them


def optuna_missing() -> bool:
    """Return whether optuna, which proposes settings, is not installed."""
    return importlib.util.find_spec("optuna") is None


class Refiner:
    """Proposes settings of one writer, by optuna's TPE.

    It uses optuna's ask-and-tell interface, with one study per writer. Equal seeds and equal scores
    give equal proposals. A score is the logarithm of a loss relative to the leader's: negative is
    better.
    """

    def __init__(self, space: Space, writer: str, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._dimensions = space.dimensions[writer]
        self._writer = writer
        self._distributions: dict[str, Any] = {
            one.option: optuna.distributions.IntDistribution(0, len(one.values) - 1)
            for one in self._dimensions
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=1, multivariate=True, constant_liar=True
            )
        self._study = optuna.create_study(sampler=sampler)
        self._asked: dict[str, Any] = {}

    def propose(self, count: int, known: Collection[str]) -> list[Candidate]:
        """Return at most `count` settings that are not `known`; fewer when it finds no more."""
        found: dict[str, Candidate] = {}
        for _ in range(_TRIES):
            if len(found) >= count:
                break
            trial = self._study.ask(self._distributions)
            values = {one.option: one.values[trial.params[one.option]] for one in self._dimensions}
            candidate = Candidate.of(self._writer, values, "refined")
            self._asked.setdefault(candidate.label, trial)
            if candidate.label not in known:
                found.setdefault(candidate.label, candidate)
        return list(found.values())

    def tell(self, candidate: Candidate, score: float) -> None:
        """Report the score of `candidate` to optuna.

        Candidates of another writer, and those off the dimensions' values, are not reported.
        """
        import optuna

        if candidate.label in self._asked:
            self._study.tell(self._asked.pop(candidate.label), score)
            return
        params = self._indices(candidate)
        if params is not None:
            self._study.add_trial(
                optuna.trial.create_trial(
                    params=params, distributions=self._distributions, value=score
                )
            )

    def _indices(self, candidate: Candidate) -> dict[str, Any] | None:
        if candidate.writer != self._writer:
            return None
        own = candidate.options.to_dict()
        if any(own[one.option] not in one.values for one in self._dimensions):
            return None
        return {one.option: one.values.index(own[one.option]) for one in self._dimensions}
