"""SimulatedStorage: a storage with known rates, to test the decisions of a tuning.

It uses no clock and no I/O: the seconds of a trial are computed, with given noise, drift and
failures.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from iobench.results import Sample, Setting
from iobench.tune.budget import Budget, TuningSizes
from iobench.tune.objective import Measurement, Objective, Step
from iobench.tune.outcome import Outcome
from iobench.tune.race import Race
from iobench.tune.space import Candidate, Dimension, Space
from iobench.tune.tuner import Tuner
from iobench.units import GIB, MIB
from iobench.writers.registry import writer_class
from iobench.writers.transfer import PathCount

_OVERHEAD_S = 0.35
"""Seconds of a trial in addition to those for moving bytes."""
_GIB_PER_S = {
    "hybrid": 2.0,
    "buffered": 0.4,
    "aiofiles": 0.8,
    "uncached": 1.9,
    "odirect": 2.2,
    "uring": 2.4,
}
_BEST_BLOCK = {"uring": 2 * MIB}
_BEST_IN_FLIGHT = 16


def true_rate(candidate: Candidate) -> float:
    """Return the bytes per second of a setting without noise.

    The rate is a smooth hill over block size and queue depth.
    """
    own = candidate.options.to_dict()
    block = math.log2(own["block_size"] / _BEST_BLOCK.get(candidate.writer, 16 * MIB))
    depth = math.log2(_in_flight(candidate) / _BEST_IN_FLIGHT)
    rate = _GIB_PER_S[candidate.writer] * GIB * (1 - 0.015 * block**2) * (1 - 0.02 * depth**2)
    rate *= 0.9 if own.get("paths") == "uncached" else 1.0
    return rate * (1.0 if own["fallocate"] else 0.94)


def _in_flight(candidate: Candidate) -> int:
    own = candidate.options.to_dict()
    each = 4 if candidate.writer == "hybrid" else 1  # its large operations are cut in four
    return int(each * own["iodepth"] if "iodepth" in own else 4 * own["threads"])


def normal(scale: float) -> Callable[[random.Random], float]:
    """Return a function that draws normal noise."""
    return lambda rng: rng.gauss(0, scale)


def heavy_tails(scale: float) -> Callable[[random.Random], float]:
    """Return a function that draws from Student's t with 3 degrees of freedom, times `scale`."""

    def draw(rng: random.Random) -> float:
        spread = math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(3)) / 3)
        return scale * rng.gauss(0, 1) / spread

    return draw


def stalls(scale: float) -> Callable[[random.Random], float]:
    """Return a function that draws normal noise; 1 trial in 20 takes 4.5 times as long."""
    return lambda rng: rng.gauss(0, scale) + (1.5 if rng.random() < 0.05 else 0.0)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What was asked of a storage: trials, those of each writer, and bytes."""

    trials: int
    by_writer: Mapping[str, int]
    written_bytes: int

    def of(self, writers: Iterable[str]) -> int:
        """Return the number of trials of `writers`."""
        return sum(self.by_writer.get(one, 0) for one in writers)


@dataclass(frozen=True, kw_only=True)
class World:
    """A storage whose rates change with what is asked of it; its samples have `noise` and `drift`.

    `rate` is the true rate of a setting, given the size of a trial and the usage before it.
    """

    rate: Callable[[Candidate, int, Usage], float] = lambda one, *_: true_rate(one)
    noise: Callable[[random.Random], float] = lambda rng: rng.gauss(0, 0.05)
    drift: Callable[[int], float] = lambda _: 0.0

    def storage(self, seed: int) -> SimulatedStorage:
        """Return this storage, unused."""
        return SimulatedStorage(seed=seed, noise=self.noise, drift=self.drift, world=self)

    def part_of_best(self, outcome: Outcome, storage: SimulatedStorage) -> float:
        """Return the rate of the choice as a part of the best, at the end and the confirmed size.

        Nobody can know what happens after the last trial.
        """

        usage = storage.usage

        def rate(one: Candidate) -> float:
            return self.rate(one, outcome.size_bytes, usage)

        return rate(outcome.chosen) / _best(outcome.space, rate)


def _uring_by_size(one: Candidate, size: int, usage: Usage) -> float:
    return true_rate(one) * (0.5 if one.writer == "uring" and size > GIB // 2 else 1.0)


def _uring_throttled(one: Candidate, size: int, usage: Usage) -> float:
    return true_rate(one) * (0.5 if one.writer == "uring" and usage.of([one.writer]) >= 20 else 1.0)


def _all_throttled(one: Candidate, size: int, usage: Usage) -> float:
    return true_rate(one) * (0.5 if usage.trials >= 60 else 1.0)


def _burst_credits(one: Candidate, size: int, usage: Usage) -> float:
    spent = usage.written_bytes > 30 * GIB
    return min(true_rate(one), 1.2 * GIB) if spent else true_rate(one)


def _hybrid(factor: float) -> Callable[[Candidate, int, Usage], float]:
    """Return rates where the default, `hybrid`, is faster by a factor."""
    return lambda one, *_: true_rate(one) * (factor if one.writer == "hybrid" else 1.0)


def worlds(noise: float = 0.05) -> dict[str, World]:
    """Return storages by name. `noise` is the standard deviation of the logarithm of a sample."""
    usual = normal(noise)
    return {
        "steady": World(noise=usual),
        "uring at half its rate above 512 MiB": World(rate=_uring_by_size, noise=usual),
        "uring at half its rate after its 20th trial": World(rate=_uring_throttled, noise=usual),
        "all at half their rate after the 60th trial": World(rate=_all_throttled, noise=usual),
        "burst credits of 30 GiB, then at most 1.2 GiB/s": World(rate=_burst_credits, noise=usual),
        "drifting to 1.8 times as slow": World(drift=lambda n: 0.6 * n / 150, noise=usual),
        "waves of 40% up and down": World(drift=lambda n: 0.4 * math.sin(n / 9), noise=usual),
        "heavy tails: Student's t, 3 degrees of freedom": World(noise=heavy_tails(noise)),
        "1 trial in 20 takes 4.5 times as long": World(noise=stalls(noise)),
        "hybrid as good as the best": World(rate=_hybrid(1.2), noise=usual),
        "hybrid 7% below the best": World(rate=_hybrid(1.133), noise=usual),
        "all settings equal": World(rate=lambda *_: 2.0 * GIB, noise=usual),
    }


def hills(seed: int, noise: float = 0.05) -> World:
    """Return a storage with rates that are drawn: other families lead, at other settings.

    Each option of each family has a best value. A factor of two in it costs up to 4%.
    """
    rng = random.Random(seed)
    spaces = space_of_writers().dimensions
    peaks: dict[str, dict[str, tuple[float, float]]] = {}
    top = {name: 2.4 * rng.uniform(0.6, 1.0) for name in _GIB_PER_S} | {"buffered": 0.4}
    for writer, dimensions in spaces.items():
        peaks[writer] = {
            one.option: (_place(one, rng.choice(one.values)), rng.uniform(0, 0.04))
            for one in dimensions
        }

    def rate(one: Candidate, size: int, usage: Usage) -> float:
        own = one.options.to_dict()
        loss = 0.0
        for dimension in spaces[one.writer]:
            peak, cost = peaks[one.writer][dimension.option]
            loss += cost * (_place(dimension, own[dimension.option]) - peak) ** 2
        return top[one.writer] * GIB * math.exp(-loss)

    return World(rate=rate, noise=normal(noise))


def _place(dimension: Dimension, value: Any) -> float:
    """Return where a value is in its dimension: numbers by logarithm, words by order."""
    return dimension.values.index(value) if isinstance(value, str) else math.log2(1 + value)


@dataclass
class SimulatedStorage:
    """Measures trials; see `iobench.tune.objective.Measure`.

    `noise` and `drift` are added to the logarithm of a trial's seconds: noise is drawn, and drift
    depends on the number of trials so far. `rate` returns the true rate of a candidate in its n-th
    trial. `error` returns why a trial fails, or None. `written_bytes` returns the bytes that a
    trial of a size writes, verified or not. With a `world` its rates count, and `rate` does not.
    """

    seed: int
    noise: Callable[[random.Random], float] = lambda rng: rng.gauss(0, 0.05)
    drift: Callable[[int], float] = lambda _: 0.0
    rate: Callable[[Candidate, int], float] = lambda candidate, _: true_rate(candidate)
    error: Callable[[Candidate, Step], str | None] = lambda *_: None
    written_bytes: Callable[[int, bool], int] = lambda size, _: size
    world: World | None = None
    asked: list[tuple[str, Step]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._taken: dict[str, int] = {}
        self._by_writer: dict[str, int] = {}

    @property
    def usage(self) -> Usage:
        """What was asked of it so far."""
        return Usage(
            trials=len(self.asked),
            by_writer=dict(self._by_writer),
            written_bytes=sum(one.size_bytes for _, one in self.asked),
        )

    def __call__(self, candidate: Candidate, step: Step) -> Measurement:
        usage = self.usage
        self.asked.append((candidate.label, step))
        self._by_writer[candidate.writer] = usage.of([candidate.writer]) + 1
        number = self._taken[candidate.label] = self._taken.get(candidate.label, 0) + 1
        error = self.error(candidate, step)
        if error is not None:
            return Measurement(took_s=1.0, spent_s=1.0, written_bytes=0, error=error)
        factor = math.exp(self.noise(self._rng) + self.drift(len(self.asked)))
        rate = self.rate(candidate, number)
        if self.world is not None:
            rate = self.world.rate(candidate, step.size_bytes, usage)
        elapsed_s = step.size_bytes / rate * factor
        return Measurement(
            took_s=elapsed_s + _OVERHEAD_S,
            spent_s=elapsed_s + _OVERHEAD_S,
            written_bytes=self.written_bytes(step.size_bytes, step.verify),
            save=_sample(candidate, step, elapsed_s),
            memory_bytes=candidate.options.to_dict()["block_size"],
        )

    def tuner(self, space: Space, **changed: Any) -> Tuner:
        """Return a tuner with the default budget that measures this storage."""
        race: dict[str, Any] = {
            "objective": Objective(),
            "budget": Budget(),
            "measure": self,
            "written_bytes": self.written_bytes,
            "report": self.trial,
            "rng": random.Random(self.seed),
        }
        race |= {name: changed.pop(name) for name in race.keys() & changed.keys()}
        sizes = TuningSizes(largest=GIB, fixed=False, fits=lambda size: size >= MIB)
        settings: dict[str, Any] = {"sizes": sizes, "progress": self, **changed}
        return Tuner(space=space, race=Race(**race), **settings)

    def phase(self, what: str) -> None:
        """Show no progress."""

    def trial(self, candidate: Candidate, step: Step, figure: str) -> None:
        """Show no progress."""


def space_of_writers(*names: str) -> Space:
    """Return the space of the real options of these writers, or of all writers with a rate here.

    It needs no target. The first writer is the baseline.
    """
    given = names or tuple(_GIB_PER_S)
    known = [Candidate.of(given[0], {}, "baseline")]
    known += [Candidate.of(name, {}, "known-good") for name in given[1:]]
    dimensions = {name: Dimension.all_of(writer_class(name)) for name in given}
    return Space(dimensions=dimensions, known=tuple(known))


def _best(space: Space, rate: Callable[[Candidate], float]) -> float:
    return max(rate(one) for name in space.dimensions for one in _settings(name))


@cache
def _settings(writer: str) -> list[Candidate]:
    space = space_of_writers(writer)
    return space.draw([writer], space.size_of(writer), (), random.Random(0))


def _sample(candidate: Candidate, step: Step, elapsed_s: float) -> Sample:
    return Sample(
        run_id="0" * 16,
        repetition=step.round,
        order=0,
        setting=Setting(writer=candidate.writer, options=candidate.options.to_dict()),
        operation="save",
        bytes=step.size_bytes,
        elapsed_s=elapsed_s,
        first_done_s=elapsed_s,
        last_done_s=elapsed_s,
        phases_s={},
        paths={"direct": PathCount(operations=1, bytes=step.size_bytes)},
        cpu_s=0.1,
        system_cpu_s=None,
        started_at="2026-01-01T00:00:00Z",
    )
