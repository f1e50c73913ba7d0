"""Rates of the ranks of a launcher, and the stragglers among them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from iobench.results import Sample, WorldFacts
from iobench.stats.estimates import median, rate

STRAGGLER = 1.2
"""A process is a straggler if it takes longer than so many times the median of its sample."""


@dataclass(frozen=True, kw_only=True)
class RankRate:
    """The median rate of one rank over the samples of a row."""

    rank: int
    host: str
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that took more than 1.2 times its sample's median in `samples` of the row's samples.

    `worst` is the largest ratio of its time to that median. `bytes` is the ratio of its bytes to
    the median of the ranks that moved some: a rank with more bytes takes longer anywhere.
    """

    rank: int
    host: str
    samples: int
    worst: float
    bytes: float


@dataclass(frozen=True, kw_only=True)
class RankRates:
    """Rates of the ranks of a row, each a median over the samples, and the stragglers."""

    slowest: RankRate
    fastest: RankRate
    median_bytes_per_s: float
    stragglers: tuple[Straggler, ...]


def stragglers(sample: Sample) -> list[int]:
    """Return the processes of one sample that take more than 1.2 times its median.

    A process that has nothing to move is none of them, and does not count in the median.
    """
    limit = STRAGGLER * _middle(sample)
    return [job for job in busy(sample) if sample.jobs_done_s[job] > limit]


def busy(sample: Sample) -> list[int]:
    """Return the processes that moved bytes; all of them where these are not recorded."""
    jobs = range(len(sample.jobs_done_s))
    return [job for job in jobs if not sample.jobs_bytes or sample.jobs_bytes[job]]


def _middle(sample: Sample) -> float:
    """Return the median time of the processes that moved bytes; 0 without any."""
    times = [sample.jobs_done_s[job] for job in busy(sample)]
    return median(times) if times else 0.0


def rank_rates(samples: Sequence[Sample], world: WorldFacts | None) -> RankRates | None:
    """Return the rates of the ranks of one row; None without ranks of a launcher.

    Ranks without bytes have no rate.
    """
    if world is None or not all(one.jobs_bytes and one.jobs_done_s for one in samples):
        return None
    rates = [
        RankRate(
            rank=rank,
            host=world.hosts[rank],
            bytes_per_s=median(
                [rate(one.jobs_bytes[rank], one.jobs_done_s[rank]) for one in samples]
            ),
        )
        for rank in range(world.size)
        if all(one.jobs_bytes[rank] for one in samples)
    ]
    if not rates:
        return None
    rates.sort(key=lambda one: one.bytes_per_s)
    return RankRates(
        slowest=rates[0],
        fastest=rates[-1],
        median_bytes_per_s=median([one.bytes_per_s for one in rates]),
        stragglers=tuple(_found(samples, world)),
    )


def _found(samples: Sequence[Sample], world: WorldFacts) -> Iterator[Straggler]:
    late: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        middle = _middle(sample)
        for rank in stragglers(sample):
            late[rank].append(sample.jobs_done_s[rank] / middle)
    for rank in sorted(late):
        sizes = samples[0].jobs_bytes
        moved = [size for size in sizes if size]
        yield Straggler(
            rank=rank,
            host=world.hosts[rank],
            samples=len(late[rank]),
            worst=max(late[rank]),
            bytes=sizes[rank] / median(moved),
        )
