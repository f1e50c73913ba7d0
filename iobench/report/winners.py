"""Summary: one row of a report. Winner: the fastest row of each operation, or target; its lead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from iobench.bench.judging.floors import Floor, OperationKind, RecordedFloor
from iobench.bench.judging.ranks import RankRates
from iobench.bench.judging.verdict import VerdictStatus
from iobench.results import MemoryUse, Operation, Sample
from iobench.results.identity import Figure
from iobench.results.setting import IF_SET, HasSetting, Setting
from iobench.stats.comparison import Finding, compare_paired, fastest, rates_by_repetition
from iobench.stats.estimates import Interval
from iobench.stats.over_time import OverTime
from iobench.writers.transfer import Fallback, LatencyFigures


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


def is_contender(sample: Sample, contender: Mapping[str, Any]) -> bool:
    """Return whether `sample` is of `contender`, in the form of the baseline of a plan's record."""
    return (sample.writer, dict(sample.options)) == (
        contender["name"],
        contender["options"],
    ) and all(contender.get(axis, value) == value for axis, value in sample.axes.of_saves().items())


PROVED = (VerdictStatus.VALID, VerdictStatus.SCALED)
RANKED = (*PROVED, VerdictStatus.UNPROVED)
"""Verdicts of the figures that can win; see `can_win`."""

_REFERENCE = "buffered"  # what most frameworks do by default

_Row = tuple[Summary, Sequence[Sample]]
_IsMeant = Callable[[_Row], bool]


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The fastest contender of one operation. The `label` of its summary names a contender.

    Full restores and each kind of partial restore (`restore_as`) have a winner each. So have
    operations next to each `background`. In a run of several targets each of them has one in each
    `target`. A winner among the targets names their locations, not labels.

    `equals` are the contenders for which no difference from the fastest is shown; it is empty if
    the fastest won. `floor` is the part up to which a difference is noise; `measured` says whether
    this run's A/A measured it, and `floor_record` is the record of an earlier A/A that did.
    `repetitions` counts the repetitions of the fastest.

    `reference` is a contender, chosen before the run, that the fastest is shown to be faster than:
    the baseline, or else `buffered`. `ratio` is the rate of the fastest over that of `reference`,
    paired by repetition, and `ratio_ci95` its 95% interval.
    """

    operation: Operation
    restore_as: str | None = None
    target: str | None = field(default=None, metadata=IF_SET)
    background: str | None = field(default=None, metadata=IF_SET)
    fastest: str
    equals: tuple[str, ...]
    floor: float
    measured: bool
    floor_record: str | None = field(default=None, metadata=IF_SET)
    repetitions: int
    reference: str | None = None
    ratio: float | None = None
    ratio_ci95: Interval | None = None

    @property
    def kind(self) -> OperationKind:
        return self.operation, self.restore_as, self.background

    @property
    def by_aa(self) -> str | None:
        """By which A/A the floor was measured: `A/A`, `A/A in results/aa.jsonl`; None without."""
        if self.floor_record is not None:
            return f"A/A in {self.floor_record}"
        return "A/A" if self.measured else None

    @property
    def what(self) -> str:
        """What is fastest here: `save`, `restore tp=8 on /mnt/a`."""
        on = f"on {self.target}" if self.target else None
        beside = f"background={self.background}" if self.background else None
        return " ".join(part for part in (self.operation, self.restore_as, beside, on) if part)


def find_winners(
    rows: Sequence[_Row], baseline: Mapping[str, Any] | None, recorded: RecordedFloor
) -> Iterator[Winner]:
    """Yield the winner of each operation that has several ranked contenders or an A/A.

    `rows` are summaries with their samples; `baseline` is the contender of the run's plan.
    `recorded` returns the floor by other records, for an operation without an A/A in this run.
    """

    def is_usual(row: _Row) -> bool:
        return row[0].writer == _REFERENCE

    def is_baseline(row: _Row) -> bool:
        return baseline is not None and "name" in baseline and is_contender(row[1][0], baseline)

    for kind in _kinds(rows):
        for target in sorted({row[0].axes.target for row in rows}, key=str):
            ranked = [row for row in _ranked(rows, kind) if row[0].axes.target == target]
            own = _own_floor(ranked)
            if len(ranked) > 1 or own is not None:
                names = [summary.label for summary, _ in ranked]
                floor = own or recorded(kind, target)
                lead = _lead(ranked, names, floor, (is_usual, is_baseline))
                yield Winner(**_named(kind), target=target, **lead)


def find_target_winners(
    rows: Sequence[_Row], targets: Sequence[str], recorded: RecordedFloor
) -> Iterator[Winner]:
    """Yield the fastest target of each operation, by the fastest contender of each target.

    `rows` are as for `find_winners`. The first of `targets` is the reference where it is slower.
    """
    for kind in _kinds(rows):
        ranked = _ranked(rows, kind)
        best = {
            target: max(there, key=lambda row: row[0].median_bytes_per_s)
            for target in targets
            if (there := [row for row in ranked if row[0].axes.target == target])
        }
        if len(best) > 1:
            floors = [recorded(kind, target) for target in best]
            lead = _lead(
                list(best.values()),
                list(best),
                _own_floor(ranked) or max(floors, key=lambda one: one.part),
                (lambda row: row[0].axes.target == targets[0],),
            )
            yield Winner(**_named(kind), **lead)


def _kinds(rows: Sequence[_Row]) -> list[OperationKind]:
    kinds = {summary.kind for summary, _ in rows}
    return sorted(kinds, key=lambda kind: (kind[0] != "save", kind[1] or "", kind[2] or ""))


def _named(kind: OperationKind) -> dict[str, Any]:
    return dict(zip(("operation", "restore_as", "background"), kind, strict=True))


def _ranked(rows: Sequence[_Row], kind: OperationKind) -> list[_Row]:
    of_kind = [row for row in rows if row[0].kind == kind]
    able = can_win([row[0] for row in of_kind])
    return [row for row in of_kind if row[0] in able]


def can_win(rows: Sequence[Summary]) -> list[Summary]:
    """Return those of `rows`, which are compared with each other, that can win.

    Figures that are NOT PROVED do not beat proved ones. Where none is proved, they are ranked.
    """
    proved = [one for one in rows if one.verdict in PROVED]
    return proved or [one for one in rows if one.verdict in RANKED]


def _own_floor(rows: Sequence[_Row]) -> Floor | None:
    return Floor.of(sample for _, samples in rows for sample in samples)


def _lead(
    rows: Sequence[_Row], names: Sequence[str], floor: Floor, references: Sequence[_IsMeant]
) -> dict[str, Any]:
    """Return the fields of the `Winner` among `rows`, which `names` name.

    Its ratio is to a row that `references` mean; the last one counts most. A row that the samples
    choose, such as the slowest one, would make a claim by chance.
    """
    best = fastest([samples for _, samples in rows], floor.part)
    first = rows[best.first]
    lead = {
        "fastest": names[best.first],
        "equals": tuple(names[position] for position in best.equals),
        "floor": floor.part,
        "measured": floor.own,
        "floor_record": floor.record,
        "repetitions": len(rates_by_repetition(first[1])),
    }
    slower = [i for i in range(len(rows)) if i != best.first and i not in best.equals]
    chosen = None
    for is_meant in references:
        chosen = next((i for i in slower if is_meant(rows[i])), chosen)
    if chosen is None:
        return lead
    difference = compare_paired(first[1], rows[chosen][1], floor.part)
    assert difference is not None, "a contender that is slower has common repetitions"
    assert difference.finding is Finding.BETTER
    return lead | {
        "reference": names[chosen],
        "ratio": difference.ratio.ratio,
        "ratio_ci95": difference.ratio.interval,
    }
