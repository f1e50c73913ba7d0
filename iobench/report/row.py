"""Summary: one row of a report, with the figures of one contender and one operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from iobench.results import Fallback, MemoryUse, Operation, Sample, WorldFacts
from iobench.results.identity import Figure
from iobench.results.setting import IF_SET, HasSetting, Setting
from iobench.stats.comparison import compare_paired
from iobench.stats.estimates import Interval, Ratio, median, rate
from iobench.stats.over_time import OverTime
from iobench.units import GIB
from iobench.writers.latency import LatencyFigures

__all__ = [
    "STRAGGLER",
    "BackgroundRates",
    "RankRate",
    "RankRates",
    "Straggler",
    "Summary",
    "baseline_samples",
    "busy",
    "is_contender",
    "paired_ratio",
    "rank_lines",
    "rank_rates",
    "straggler_lines",
    "stragglers",
]

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


def rank_lines(label: str, of: int, rates: RankRates) -> Iterator[str]:
    """Yield the range of the ranks' rates as a line; `of` is the number of samples."""
    low, high = rates.slowest, rates.fastest
    yield (
        f"ranks of {label}: {_gib(low.bytes_per_s)} (rank {low.rank}, host {low.host}) to "
        f"{_gib(high.bytes_per_s)} GiB/s (rank {high.rank}, host {high.host}), "
        f"median {_gib(rates.median_bytes_per_s)}; medians of {of}"
    )


def straggler_lines(label: str, of: int, rates: RankRates) -> Iterator[str]:
    """Yield the stragglers as one line, by host; `of` is the number of samples."""
    by_host: dict[str, list[str]] = defaultdict(list)
    for one in rates.stragglers:
        more = f", with {one.bytes:.3g}x the bytes" if one.bytes > STRAGGLER else ""
        text = f"rank {one.rank} in {one.samples} of {of}, up to {one.worst:.2f}x the median{more}"
        by_host[one.host].append(text)
    if by_host:
        hosts = "; ".join(f"host {host}: {', '.join(texts)}" for host, texts in by_host.items())
        yield f"stragglers of {label}: {hosts}"


def _gib(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GIB:.2f}"


@dataclass(frozen=True, kw_only=True)
class BackgroundRates:
    """What a process got that restored in the background, and what it cost.

    `median_bytes_per_s` is the median of its rates while the clock ran. `kept` is the ratio of the
    operation's own rate to that without a background, paired by repetition, and `kept_ci95` its
    interval. Both are None where the run has no such samples, or one of the two is not ranked.
    """

    writer: str
    median_bytes_per_s: float
    kept: float | None = None
    kept_ci95: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class Summary(HasSetting):
    """Figures of all saves, or all restores, of one writer at one setting.

    Samples of one repetition (A/A) are not independent: together they have one rate, all their
    bytes over all their time. `median_bytes_per_s` is the median of the rates of `repetitions`,
    `ci95_bytes_per_s` its interval (None for 1 repetition), `of_ceiling` its ratio to the best job
    of fio (None without one). `cpu_s_per_gib` is all CPU seconds over all GiB. `memory` has the
    medians of both parts; it is None if no sample has it. `first_done_s`, `last_done_s` and
    `phases_s` are medians. `paths` and `decisions` count operations over all samples, and
    `latencies` are those of all samples.

    `ratio` is the rate over the baseline's rate, paired by repetition, and `ratio_ci95` its
    interval (see `stats.paired_log_ratio`). Both are None without a baseline, for the baseline,
    and unless both contenders are VALID or SCALED.

    `device_idle` is the median part of the time in which the device's counter did not grow; None
    where it was not counted. A writer with a high part is limited by memory or CPU.

    `over_time` is about saves that follow each other for a time (`iobench run --duration`); absent
    in other runs, and for restores.

    `ranks` has the rates of the ranks of a launcher; it is absent in other runs. So is
    `background_rates` without restores by another process at the same time.

    `label` is the writer with the options and axes that differ between rows. `Winner` names rows
    by their label.
    """

    label: str = ""
    setting: Setting
    operation: Operation
    samples: int
    repetitions: int
    bytes: int
    median_bytes_per_s: float
    ci95_bytes_per_s: Interval | None
    of_ceiling: float | None
    ratio: float | None = None
    ratio_ci95: Interval | None = None
    cpu_s_per_gib: float
    device_idle: float | None = field(default=None, metadata=IF_SET)
    memory: MemoryUse | None = None
    first_done_s: float
    last_done_s: float
    over_time: OverTime | None = field(default=None, metadata=IF_SET)
    ranks: RankRates | None = field(default=None, metadata=IF_SET)
    background_rates: BackgroundRates | None = field(default=None, metadata=IF_SET)
    phases_s: Mapping[str, float]
    paths: Mapping[str, int]
    fallbacks: tuple[Fallback, ...]
    decisions: Mapping[str, int]
    latencies: Mapping[str, LatencyFigures] = field(default_factory=dict, metadata=IF_SET)
    verdict: str
    reasons: tuple[str, ...]


def baseline_samples(
    groups: Mapping[Figure, Sequence[Sample]],
    baseline: Mapping[str, Any] | None,
    of: Sample,
) -> Sequence[Sample]:
    """Return the baseline's samples of the same operation as `of`; empty where `of` is one of them.

    `baseline` has the contender's `name` and `options`, and the axes of saves that the run had.
    Without a `name` it is a target: the same contender there is the baseline of `of`. It is None
    where there is no baseline.
    """
    if baseline is None:
        return []
    if "name" not in baseline:
        own = {"name": of.writer, "options": dict(of.options), **of.axes.of_saves()}
        baseline = own | {name: value for name, value in baseline.items() if name in own}
    if is_contender(of, baseline):
        return []
    kind = of.operation, of.axes.restore_as
    found = (
        samples
        for samples in groups.values()
        if (samples[0].operation, samples[0].axes.restore_as) == kind
        and is_contender(samples[0], baseline)
    )
    return next(found, [])


def paired_ratio(samples: Sequence[Sample], against: Sequence[Sample]) -> Ratio | None:
    """Return the ratio of `samples` to `against` (see `compare_paired`); None without a pair."""
    difference = compare_paired(samples, against)
    return None if difference is None else difference.ratio


def is_contender(sample: Sample, contender: Mapping[str, Any]) -> bool:
    """Return whether `sample` is of `contender`, in the form of the baseline of a plan's record."""
    return (sample.writer, dict(sample.options)) == (
        contender["name"],
        contender["options"],
    ) and all(contender.get(axis, value) == value for axis, value in sample.axes.of_saves().items())
