"""Disturbances by others on the machine during one sample: all of them, or the unusual ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from iobench.results.records import Interference, Sample
from iobench.stats.estimates import median
from iobench.units import format_seconds, format_size

_PART = 0.01  # of the sample's time or bytes: a smaller disturbance explains nothing
_TIMES = 2.0  # as much as in the median sample
_WORDS: Mapping[str, Callable[[float], str]] = {
    "steal_s": lambda amount: f"{format_seconds(amount)} of CPU stolen",
    "memory_stall_s": lambda amount: f"{format_seconds(amount)} of waiting for memory",
    "foreign_read_bytes": lambda amount: f"{format_size(amount)} read by others",
    "foreign_write_bytes": lambda amount: f"{format_size(amount)} written by others",
}


def disturbances(seen: Interference) -> list[str]:
    """Return what others did while the clock ran, in words."""
    return [words(amount) for name, words in _WORDS.items() if (amount := getattr(seen, name))]


def unusual(samples: Sequence[Sample], position: int) -> list[str]:
    """Return the disturbances of `samples[position]` that most of the others do not have, in words.

    A disturbance counts if it took at least 1% of the sample's time (stolen CPU, waiting for
    memory) or bytes (others' I/O on the device). It must also be more than twice that of the median
    sample. Empty without such a disturbance, or if the samples have no such counters.
    """
    return list(_found(samples, position))


def _found(samples: Sequence[Sample], position: int) -> Iterator[str]:
    sample = samples[position]
    for name, words in _WORDS.items():
        own = getattr(sample.interference, name) if sample.interference else None
        whole = sample.elapsed_s if name.endswith("_s") else sample.bytes
        if own is None or own < _PART * whole:
            continue  # most are: the others need no look then
        amounts = [getattr(one.interference, name) for one in samples if one.interference]
        if own > _TIMES * median([amount for amount in amounts if amount is not None]):
            yield words(own)
