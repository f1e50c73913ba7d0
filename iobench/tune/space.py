"""Space: the settings that a tuning may try on a target, from the writers' own option ranges."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from iobench.errors import (
    IobenchError,
    TargetError,
    UnavailableError,
    UnknownNameError,
    UsageError,
)
from iobench.units import MIB
from iobench.writers import registry
from iobench.writers.base import Writer
from iobench.writers.options import WriterOptions

Origin = Literal["baseline", "known-good", "drawn", "refined"]
"""`baseline`: the setting that the winner is compared with. `known-good`: a setting that did well
on some storage before. `drawn`: a random setting of the space. `refined`: one near a leader."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A writer with all its options. Candidates that differ only in `origin` have equal labels."""

    writer: str
    options: WriterOptions
    origin: Origin

    @classmethod
    def of(cls, writer: str, values: Mapping[str, Any], origin: Origin) -> Candidate:
        """Make a candidate from a name and some options. Raises what `registry.make` raises."""
        made = registry.make(writer, **values)
        return cls(writer=made.name, options=made.options, origin=origin)

    @property
    def label(self) -> str:
        """The name and the options that are not at their defaults, in the syntax of `--writer`."""
        return ",".join([self.writer, *self.options.changed()])

    @property
    def well_known(self) -> bool:
        """Whether the setting was known before this tuning."""
        return self.origin in ("baseline", "known-good")

    def make(self) -> Writer:
        """Return a new writer."""
        return registry.writer_class(self.writer)(self.options)


_DEFAULTS = ("hybrid", "buffered")
"""The default writer of a Checkpointer; the second one takes its place where it does not work."""
_KNOWN_GOOD: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "uring": ({"block_size": MIB, "iodepth": 32},),
    "odirect": ({"block_size": 32 * MIB}, {"block_size": 16 * MIB, "threads": 2}),
    "uncached": ({"threads": 4},),
    "s3": ({"threads": 16}, {"part_size": 16 * MIB, "threads": 4}),
}
"""Settings besides the defaults that did well before: docs/decisions/0004, 0010, docs/s3.md."""


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One option of one writer and the values that a tuner may try, its default among them."""

    option: str
    values: tuple[Any, ...]

    @classmethod
    def all_of(cls, writer: type[Writer]) -> tuple[Dimension, ...]:
        """Return those of a class of writers."""
        searched = [info for info in writer.Options.describe() if info.search]
        return tuple(
            cls(option=one.name, values=tuple(dict.fromkeys((*one.search, one.default))))
            for one in searched
        )


@dataclass(frozen=True, kw_only=True)
class Space:
    """The writers that work on a target, each with its dimensions.

    `known` are the settings to begin with, the most promising first. `left_out` gives the reason
    for each writer that takes no part.
    """

    dimensions: Mapping[str, tuple[Dimension, ...]]
    known: tuple[Candidate, ...]
    left_out: tuple[str, ...] = ()

    @property
    def baseline(self) -> Candidate:
        """The default that a winner must beat: that of `hybrid`, or of the first writer."""
        return self.known[0]

    @property
    def size(self) -> int:
        """The number of settings."""
        return sum(self.size_of(writer) for writer in self.dimensions)

    def size_of(self, writer: str) -> int:
        """Return the number of settings of `writer`."""
        return math.prod(len(one.values) for one in self.dimensions[writer])

    def draw(
        self, writers: Sequence[str], count: int, known: Collection[str], rng: random.Random
    ) -> list[Candidate]:
        """Draw at most `count` random settings, about as many of each of `writers`.

        No drawn setting has a label in `known`. The result is shorter where no more are left.
        """
        pools = {name: self._shuffled(name, known, rng) for name in writers}
        drawn: list[Candidate] = []
        while pools and len(drawn) < count:
            for name in list(pools):
                found = next(pools[name], None)
                if found is None:
                    del pools[name]
                elif len(drawn) < count:
                    drawn.append(found)
        return drawn

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Return all settings one step away from `candidate` in one option."""
        found = []
        own = candidate.options.to_dict()
        for dimension in self.dimensions.get(candidate.writer, ()):
            at = _nearest(dimension, own[dimension.option])
            for step in (-1, 1):
                if 0 <= at + step < len(dimension.values):
                    values = own | {dimension.option: dimension.values[at + step]}
                    found.append(Candidate.of(candidate.writer, values, "refined"))
        return found

    def _shuffled(
        self, writer: str, known: Collection[str], rng: random.Random
    ) -> Iterator[Candidate]:
        """Yield the settings of `writer` that are not known, each once, in random order."""
        dimensions = self.dimensions[writer]
        for position in rng.sample(range(self.size_of(writer)), self.size_of(writer)):
            values = {}
            for one in dimensions:
                position, index = divmod(position, len(one.values))
                values[one.option] = one.values[index]
            found = Candidate.of(writer, values, "drawn")
            if found.label not in known:
                yield found


def space_of(target: str, names: Sequence[str] | None = None) -> Space:
    """Return the space of the writers that work on `target`; of `names` only, if given.

    Tries each writer to find those that work. Raises UnknownNameError for an unknown name,
    TargetError for a missing bucket, and UnavailableError with every reason when no writer works.
    """
    for name in names or ():
        if name not in registry.names():
            raise UnknownNameError("writer", name, registry.names())
    works: dict[str, Writer] = {}
    left_out: list[str] = []
    for name in names or registry.names():
        try:
            writer = _working(name, target)
        except TargetError:
            raise
        except UsageError as error:
            if names:
                left_out.append(str(error))
        except IobenchError as error:
            left_out.append(str(error))
        else:
            if writer.stores:
                works[name] = writer
    if not works:
        nothing = f"{', '.join(names or ())} stores nothing; choose another --writer."
        raise UnavailableError("", "; ".join(left_out) or nothing)
    promising = [*_DEFAULTS[:1], *_KNOWN_GOOD, *_DEFAULTS[1:], *works]
    ordered = [name for name in dict.fromkeys(promising) if name in works]
    first = next((name for name in _DEFAULTS if name in works), ordered[0])
    known = [Candidate.of(first, {}, "baseline")]
    known += [Candidate.of(name, {}, "known-good") for name in ordered if name != first]
    known += [
        Candidate.of(name, values, "known-good")
        for name in ordered
        for values in _KNOWN_GOOD.get(name, ())
    ]
    return Space(
        dimensions={name: Dimension.all_of(type(writer)) for name, writer in works.items()},
        known=tuple(known),
        left_out=tuple(left_out),
    )


def _working(name: str, target: str) -> Writer:
    """Return the writer of this name. Raises IobenchError where it does not work on `target`."""
    writer = registry.make(name)
    writer.check_scheme(target)
    writer.require(target)
    return writer


def _nearest(dimension: Dimension, value: Any) -> int:
    """Return the position of `value`, or of the nearest value where it is not in the dimension."""
    if value in dimension.values:
        return dimension.values.index(value)
    return min(range(len(dimension.values)), key=lambda i: abs(dimension.values[i] - value))
