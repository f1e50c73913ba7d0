"""Unusual disturbances by other users of the machine during one sample, compared with its group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from iobench.results.records import Interference, Sample
from iobench.stats.estimates import median
from iobench.units import format_seconds, format_size

_PART = 0.01  # of the sample's time or bytes: a smaller disturbance explains nothing
_TIMES = 2.0  # as much as in the median sample

_Amount = float | None


def unusual(samples: Sequence[Sample], position: int) -> list[str]:
    """Return the disturbances of `samples[position]` that most of the others do not have, in words.

    A disturbance counts if it took at least 1% of the sample's time (stolen CPU, waiting for
    memory) or bytes (others' I/O on the device). It must also be more than twice that of the median
    sample. Empty without such a disturbance, or if the samples have no such counters.
    """
    return list(_found(samples, position))


def _found(samples: Sequence[Sample], position: int) -> Iterator[str]:
    sample = samples[position]
    kinds: tuple[tuple[Callable[[Interference], _Amount], float, Callable[[float], str]], ...] = (
        (lambda one: one.steal_s, sample.elapsed_s, lambda x: f"{format_seconds(x)} of CPU stolen"),
        (
            lambda one: one.memory_stall_s,
            sample.elapsed_s,
            lambda x: f"{format_seconds(x)} of waiting for memory",
        ),
        (
            lambda one: one.foreign_read_bytes,
            sample.bytes,
            lambda x: f"{format_size(x)} read by others",
        ),
        (
            lambda one: one.foreign_write_bytes,
            sample.bytes,
            lambda x: f"{format_size(x)} written by others",
        ),
    )
    for amount_of, whole, say in kinds:
        own = amount_of(sample.interference) if sample.interference else None
        if own is None or own < _PART * whole:
            continue  # most are: the others need no look then
        amounts = [amount_of(one.interference) for one in samples if one.interference]
        if own > _TIMES * median([amount for amount in amounts if amount is not None]):
            yield say(own)
