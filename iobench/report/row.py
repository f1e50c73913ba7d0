"""Summary: one row of a report, with the figures of one contender and one operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from iobench.bench.judging.floors import OperationKind
from iobench.bench.judging.ranks import RankRates
from iobench.results import Fallback, MemoryUse, Operation, Sample
from iobench.results.identity import Figure
from iobench.results.setting import IF_SET, HasSetting, Setting
from iobench.stats.comparison import compare_paired
from iobench.stats.estimates import Interval, Ratio
from iobench.stats.over_time import OverTime
from iobench.writers.latency import LatencyFigures


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

    @property
    def kind(self) -> OperationKind:
        """What is compared with each other: operation, part that is restored, background."""
        return self.operation, self.axes.restore_as, self.axes.background


def baseline_samples(
    groups: Mapping[Figure, Sequence[Sample]], baseline: Mapping[str, Any] | None, of: Sample
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
