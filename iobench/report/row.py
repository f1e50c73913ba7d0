"""Summary: one row of a report, with the figures of one contender and one operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from iobench.bench.judging.over_time import OverTime
from iobench.bench.judging.stats import Interval
from iobench.report.ranks import RankRates
from iobench.results import Fallback, MemoryUse, Operation
from iobench.results.setting import IF_SET, HasSetting, Setting
from iobench.writers.latency import LatencyFigures

__all__ = ["BackgroundRates", "Summary"]


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
