"""Generated storages for a tuning: writers that slow down together, in ways that a seed draws.

The rules of a tuning were chosen with seeds below 1000. docs/autotune.md has the error rates of
seeds from 1100000 on, which were run once, after the rules were fixed.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from iobench.tune.space import Candidate
from iobench.units import GIB, MIB
from support.simulated_storage import Usage, World, hills, normal, space_of_writers, true_rate

_Rate = Callable[[Candidate, int, Usage], float]
_Trigger = Callable[[int, Usage], bool]


@dataclass(frozen=True, kw_only=True)
class _Slowdown:
    """The rates of some writers are multiplied by `factor` while the trigger is true."""

    writers: frozenset[str]
    factor: float
    trigger: _Trigger

    def of(self, one: Candidate, size: int, usage: Usage) -> float:
        slow = one.writer in self.writers and self.trigger(size, usage)
        return self.factor if slow else 1.0


def by_size(seed: int, noise: float = 0.05) -> World:
    """One or two groups of writers are slower above or below a size of a checkpoint."""
    rng = random.Random(f"size {seed}")
    return _world([_slowdown(rng, _size_trigger) for _ in range(rng.choice((1, 2)))], noise)


def by_usage(seed: int, noise: float = 0.05) -> World:
    """One or two groups of writers become slower after some trials, trials of theirs, or bytes."""
    rng = random.Random(f"usage {seed}")
    return _world([_slowdown(rng, _usage_trigger) for _ in range(rng.choice((1, 2)))], noise)


def on_hills(seed: int, noise: float = 0.05) -> World:
    """A group slows down by size and another by usage, with best settings that are drawn too."""
    rng = random.Random(f"hills {seed}")
    slowdowns = [_slowdown(rng, _size_trigger), _slowdown(rng, _usage_trigger)]
    return _world(slowdowns, noise, hills(seed).rate)


GENERATORS: dict[str, Callable[[int, float], World]] = {
    "groups slow above or below a size": by_size,
    "groups slow after trials or bytes": by_usage,
    "both, and another hill for each seed": on_hills,
}


def _world(slowdowns: list[_Slowdown], noise: float, rate: _Rate | None = None) -> World:
    def slowed(one: Candidate, size: int, usage: Usage) -> float:
        found = true_rate(one) if rate is None else rate(one, size, usage)
        for each in slowdowns:
            found *= each.of(one, size, usage)
        return found

    return World(rate=slowed, noise=normal(noise))


def _slowdown(
    rng: random.Random, draw: Callable[[random.Random, frozenset[str]], _Trigger]
) -> _Slowdown:
    names = sorted(space_of_writers().dimensions)
    writers = frozenset(rng.sample(names, rng.randint(1, len(names) - 1)))
    return _Slowdown(writers=writers, factor=rng.uniform(0.3, 0.9), trigger=draw(rng, writers))


def _size_trigger(rng: random.Random, writers: frozenset[str]) -> _Trigger:
    limit, above = rng.choice((128, 384, 768)) * MIB, rng.random() < 0.5
    return lambda size, _: (size > limit) == above


def _usage_trigger(rng: random.Random, writers: frozenset[str]) -> _Trigger:
    kind, part = rng.choice(("trials", "own trials", "bytes")), rng.random()
    if kind == "trials":
        return lambda _, usage: usage.trials >= 20 + 100 * part
    if kind == "own trials":
        return lambda _, usage: usage.of(writers) >= 5 + 55 * part
    return lambda _, usage: usage.written_bytes >= (5 + 45 * part) * GIB
