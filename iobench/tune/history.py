"""History: what every trial of a tuning gave, and how long the next one will take by that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from iobench.tune.measurement import Measurement, Phase, Step

__all__ = ["History"]


@dataclass(kw_only=True)
class History:
    """Measurements by setting, each with the step that asked for it, in their order."""

    trials: dict[str, list[tuple[Step, Measurement]]] = field(default_factory=dict, init=False)

    def add(self, name: str, step: Step, measured: Measurement) -> None:
        """One more trial of `name`."""
        self.trials.setdefault(name, []).append((step, measured))

    def of(self, name: str, phase: Phase | None = None) -> list[Measurement]:
        """What the trials of `name` gave, in one phase or in all."""
        return [one for step, one in self.trials.get(name, ()) if phase in (None, step.phase)]

    def by_probe(self, names: Iterable[str], loss: Callable[[Measurement], float]) -> list[str]:
        """Those of `names` whose first trial had no error, the one with the least loss first."""
        first = {name: self.trials[name][0][1] for name in names if name in self.trials}
        found = {name: loss(one) for name, one in first.items() if not one.error}
        return sorted(found, key=found.__getitem__)

    def expected_s(self, name: str, size_bytes: int) -> float:
        """As long as its last trial took, what moves bytes in proportion. KeyError without one."""
        step, measured = self.trials[name][-1]
        return measured.expected_s(size_bytes / step.size_bytes)
