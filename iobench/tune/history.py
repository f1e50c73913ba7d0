"""History: the measurements of a tuning, and the expected duration of the next trial from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from iobench.tune.measurement import Measurement, Phase, Step

__all__ = ["History"]


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
