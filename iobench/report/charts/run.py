"""Charts of a run: rates, each sample in its order, and the bytes of one sample over time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from itertools import pairwise

import altair as alt

from iobench.bench.judging.verdict import Context, judge
from iobench.report.answer import answer
from iobench.report.charts.lines import Curve, lines_chart
from iobench.report.charts.spread import spread_chart
from iobench.report.document import Chart, Dot, Section, Spread
from iobench.report.palette import colour_of, shape_of
from iobench.report.summary import Report, disturbances, summarise_with_samples
from iobench.report.winners import PROVED, RANKED, Summary
from iobench.results import Operation, ResultFile, Sample
from iobench.results.setting import at_target
from iobench.stats.comparison import rates
from iobench.stats.estimates import interval_heading, rate
from iobench.units import GIB, format_rate, format_seconds, format_size, in_gib

_MARGIN = 1.06  # of the axis, beyond the largest figure that counts
_MOST_POINTS = 60  # of a line over time
_LEAST_STEP = 0.25  # of a step: a shorter last one is joined with the one before


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One row of a report with the samples that it summarises, saves with their verification."""

    summary: Summary
    samples: Sequence[Sample]
    context: Context

    @property
    def counts(self) -> bool:
        """Whether its figure counts: not INVALID, not FAILED."""
        return self.summary.verdict in RANKED

    @property
    def colour(self) -> str:
        return colour_of(self.summary.writer)

    @property
    def shape(self) -> str:
        return shape_of(self.summary.writer)

    @property
    def median(self) -> float:
        """GiB/s."""
        return in_gib_per_s(self.summary.median_bytes_per_s)

    @cached_property
    def rates(self) -> list[float]:
        """GiB/s of each sample."""
        return [in_gib_per_s(one) for one in rates(self.samples)]

    def words(self, sample: Sample) -> dict[str, str]:
        """Return what a tooltip says about `sample`, by heading."""
        verdict = judge(sample, self.context)
        bad = verdict.status not in PROVED
        return {
            "writer": self.summary.label,
            "repetition": str(sample.repetition + 1),
            "rate": format_rate(rate(sample.bytes, sample.elapsed_s)),
            "time": f"{format_seconds(sample.elapsed_s)} for {format_size(sample.bytes)}",
            "verdict": f"{verdict.status}: {verdict.reasons[0]}" if bad else str(verdict.status),
            "others meanwhile": disturbances(sample) or "not recorded",
        }


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rows that a chart compares: one operation, and one of several targets."""

    operation: Operation
    restore_as: str | None
    target: str | None
    rows: tuple[RunRow, ...]

    @property
    def name(self) -> str:
        """What is compared: `save`, `restore tp=8 on /mnt/a`."""
        on = f"on {self.target}" if self.target else None
        return " ".join(part for part in (self.operation, self.restore_as, on) if part)

    def label(self, row: RunRow) -> str:
        """Return the label of a row without what all rows here share: the target."""
        return row.summary.label.replace(at_target("", self.target), "")

    def slug(self, what: str) -> str:
        """Return the name of a chart of this group: `rate-restore-tp-8`."""
        return re.sub(r"[^a-z0-9]+", "-", f"{what} {self.name}".lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The report of a run and its rows, in the same order: all charts are made from them."""

    report: Report
    rows: tuple[RunRow, ...]
    started_at: str

    @classmethod
    def of(cls, result: ResultFile) -> Measured:
        report, samples = summarise_with_samples(result)
        context = Context.of(result.run)
        rows = (
            RunRow(summary=summary, samples=own, context=context)
            for summary, own in zip(report.summaries, samples, strict=True)
        )
        return cls(report=report, rows=tuple(rows), started_at=result.run.started_at)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The rows by operation, part that is restored, and target; in the order of the report."""
        found: dict[tuple[Operation, str | None, str | None], list[RunRow]] = {}
        for row in self.rows:
            axes = row.summary.axes
            kind = row.summary.operation, axes.restore_as, axes.target
            found.setdefault(kind, []).append(row)
        return tuple(
            Group(operation=operation, restore_as=restore_as, target=target, rows=tuple(rows))
            for (operation, restore_as, target), rows in found.items()
        )


def in_gib_per_s(bytes_per_s: float) -> float:
    return bytes_per_s / GIB


def run_charts(result: ResultFile) -> Iterator[Section]:
    """Yield the sections of the charts of a run, each with a chart for each group of rows."""
    one = Measured.of(result)
    kinds: dict[str, Callable[[Group], Chart | None]] = {
        "Rates": partial(rates_chart, one),
        "Over time": over_time_chart,
        "Drift": partial(in_order_chart, one.started_at),
    }
    for name, chart_of in kinds.items():
        found = [chart for group in one.groups if (chart := chart_of(group))]
        yield Section(heading=name, charts=tuple(found))


def rates_chart(one: Measured, group: Group) -> Chart:
    """Return the chart of the rates of one operation, fastest first.

    Charts of several targets have the same axis. Rows that cannot win have hollow dots. They do not
    widen the axis: what does not store anything may be a hundred times faster.
    """
    best = one.report.ceiling if group.target is None else one.report.ceilings[group.target]
    limit = best.of(group.operation)
    ceiling = None if limit is None else in_gib_per_s(limit)
    same = [other for other in one.groups if other.operation == group.operation and group.target]
    most = _MARGIN * max(ceiling or 0.0, *map(highest, [group, *same]))
    subject = group.name.capitalize()
    found = (line for line in answer(one.report) if line.subject == subject and not group.target)
    rows = [_spread(group, row) for row in group.rows]
    return spread_chart(
        rows,
        name=group.slug("rate"),
        title=f"Rate of each {group.name}",
        headline=next((f"{subject}: {line.texts[0]}" for line in found), ""),
        says=f"Median rate of each {group.name}, fastest first",
        caption=_caption(group, ceiling, most),
        axis="GiB/s",
        mark=None if ceiling is None else (ceiling, f"fio {in_gib(ceiling, 1)}"),
        ends=(0.0, most),
    )


def highest(group: Group) -> float:
    """Return the highest rate in GiB/s of a sample that counts, or of any where none does."""
    shown = [row for row in group.rows if row.counts] or group.rows
    return max(rate for row in shown for rate in row.rates)


def _spread(group: Group, row: RunRow) -> Spread:
    interval = row.summary.ci95_bytes_per_s
    rate = f"{in_gib(row.summary.median_bytes_per_s)} GiB/s"
    return Spread(
        label=group.label(row),
        figure=rate if row.counts else f"{row.summary.verdict}, {rate}",
        colour=row.colour,
        shape=row.shape,
        hollow=not row.counts,
        middle=row.median,
        bounds=(in_gib_per_s(interval[0]), in_gib_per_s(interval[1])) if interval else None,
        dots=[
            Dot(x=rate, words=row.words(sample))
            for sample, rate in zip(row.samples, row.rates, strict=True)
        ],
    )


def _caption(group: Group, ceiling: float | None, most: float) -> str:
    interval = interval_heading(row.summary.repetitions for row in group.rows).replace("\n", " ")
    parts = [f"One dot per {group.operation}; upright line: median; bar: its {interval}."]
    if any(row.shape != group.rows[0].shape for row in group.rows):
        parts.append("Diamonds are other projects.")
    if ceiling is not None:
        parts.append("Dashed: the best fio job in the same directory.")
    if not all(row.counts for row in group.rows):
        parts.append("Hollow dots do not count.")
    if any(rate > most for row in group.rows for rate in row.rates):
        parts.append("Triangles are beyond the axis.")
    return " ".join(parts)


def in_order_chart(started_at: str, group: Group) -> Chart | None:
    """Return the chart of all samples of one operation over the time of the run.

    None where each row has one sample: then nothing can drift.
    """
    if all(len(row.samples) == 1 for row in group.rows):
        return None
    began = datetime.fromisoformat(started_at)
    most = _MARGIN * highest(group)
    samples = [_in_order(group, row, began) for row in group.rows]
    first = min(dot.x for one in samples for dot in one.dots)
    changes = [one for row in group.rows for one in _changes(group, row, first)]
    dashed = " Dashed: the rates before and after a change that is shown." if changes else ""
    return lines_chart(
        [*samples, *changes],
        name=group.slug("in-order"),
        title=f"Each {group.name} in the order in which they ran",
        says=f"Rates of {sum(len(one.dots) for one in samples)} samples over the time of the run",
        caption="A slope is drift: a full write cache, throttling or used up burst credits. A dip "
        f"of all writers at once is the machine or another user of it.{dashed}",
        x=alt.X(
            "x:Q",
            axis=alt.Axis(title="minutes since the start of the run", tickCount=8),
            scale=alt.Scale(zero=True),
        ),
        y=alt.Y(
            "y:Q",
            axis=alt.Axis(title="GiB/s", tickCount=5),
            scale=alt.Scale(domain=[0, most], nice=False, clamp=True),
        ),
    )


def _in_order(group: Group, row: RunRow, began: datetime) -> Curve:
    return Curve(
        label=group.label(row),
        colour=row.colour,
        figure=f"from {in_gib(row.rates[0], 1)} to {in_gib(row.rates[-1], 1)} GiB/s",
        dots=[
            Dot(
                x=(datetime.fromisoformat(sample.started_at) - began).total_seconds() / 60,
                y=rate,
                words=row.words(sample),
                shape=row.shape,
            )
            for sample, rate in zip(row.samples, row.rates, strict=True)
        ],
    )


def _changes(group: Group, row: RunRow, start: float) -> Iterator[Curve]:
    """Yield the rate before a change of a row, the step, and the rate after it; in minutes."""
    over_time = row.summary.over_time
    if over_time is not None and over_time.change is not None:
        change = over_time.change
        at, end = start + change.at_s / 60, start + over_time.elapsed_s / 60
        before, after = map(in_gib_per_s, (change.before_bytes_per_s, change.after_bytes_per_s))
        line = [(start, before), (at, before), (at, after), (end, after)]
        yield Curve(label=group.label(row), colour=row.colour, line=line, dashed=True)


def over_time_chart(group: Group) -> Chart | None:
    """Return the chart of the median sample of each row; None where no sample has a series."""
    shown = [(row, sample) for row in group.rows if (sample := _median_sample(row))]
    if not shown:
        return None
    curves = [curve for row, sample in shown for curve in _series(group, row, sample)]
    return lines_chart(
        curves,
        name=group.slug("over-time"),
        title=f"Over time: the median {group.name} of each writer",
        says=f"Bytes over time of one {group.name} of each writer",
        caption=_over_time_caption([sample for _, sample in shown]),
        x=alt.X("x:Q", axis=alt.Axis(title="seconds", tickCount=6), scale=alt.Scale(nice=False)),
        y=alt.Y("y:Q", axis=alt.Axis(title="GiB/s", tickCount=5), scale=alt.Scale(zero=True)),
        step=True,
    )


def _median_sample(row: RunRow) -> Sample | None:
    """Return the sample with a series whose rate is nearest to the median."""
    have = [
        (abs(rate - row.median), sample)
        for sample, rate in zip(row.samples, row.rates, strict=True)
        if sample.series is not None and (sample.series.completed or sample.series.counted)
    ]
    return min(have, key=lambda one: one[0])[1] if have else None


def _series(group: Group, row: RunRow, sample: Sample) -> Iterator[Curve]:
    """Yield the line of the writer's own count, and of the device's or the process's, dashed."""
    series = sample.series
    assert series is not None
    took = f"repetition {sample.repetition + 1}, {format_seconds(sample.elapsed_s)}"
    for values, by in ((series.completed, "the writer"), (series.counted, series.counter)):
        if values:
            rates = _rates(values, series.interval_s, sample.elapsed_s)
            steps = [*rates, (sample.elapsed_s, rates[-1][1])]
            yield Curve(
                label=group.label(row),
                colour=row.colour,
                line=[(round(at_s, 4), round(in_gib_per_s(rate), 5)) for at_s, rate in steps],
                figure=f"{took}, counted by {by}",
                dashed=values is series.counted,
            )


def _rates(values: Sequence[int], interval_s: float, elapsed_s: float) -> list[tuple[float, float]]:
    """Return the begin and the rate of each step. The last one ends with the clock."""
    step = math.ceil(len(values) / _MOST_POINTS)
    begins = list(range(0, len(values), step))
    if len(begins) > 1 and elapsed_s - begins[-1] * interval_s < _LEAST_STEP * step * interval_s:
        begins.pop()  # a moment at the end: its rate is mostly rounding
    rates = []
    for begin, end in pairwise([*begins, len(values)]):
        end_s = min(end * interval_s, elapsed_s) if end < len(values) else elapsed_s
        length_s = max(end_s - begin * interval_s, _LEAST_STEP * interval_s)
        rates.append((begin * interval_s, sum(values[begin:end]) / length_s))
    return rates


def _over_time_caption(shown: Sequence[Sample]) -> str:
    series = [one.series for one in shown if one.series]
    length = format_seconds(min(one.interval_s for one in series))
    counters = sorted({one.counter for one in series if one.counter})
    dashed = f" Dashed: bytes that the {' or '.join(counters)} counted" if counters else ""
    others = ", those of other processes included" if "device" in counters else ""
    end = "." if dashed else ""
    return f"Lines: bytes that the writer completed in each {length}.{dashed}{others}{end}"
