"""When the processes of `--numjobs` are done: the first, the last, and stragglers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from iobench.bench.judging.stats import median
from iobench.report.grid import Grid
from iobench.report.page.charts.spread import Dot, Spread, spread_spec
from iobench.report.page.page import Chart
from iobench.report.page.rows import Group, RunRow
from iobench.results import Sample
from iobench.units import format_seconds

__all__ = ["STRAGGLER", "jobs_chart", "stragglers"]

STRAGGLER = 1.2
"""A process is a straggler if it takes longer than so many times the median of its sample."""
_WORDS = ("repetition", "process", "done after")
_SHAPE = "triangle-up"
_EVERY = "One dot per process. Triangles are stragglers: above 1.2 times their sample's median."
_ENDS = "Dots are the first and the last process of each sample: this record has no others."


def jobs_chart(group: Group) -> Chart | None:
    """Return the chart of one operation; None where each row has one process."""
    several = [row for row in group.rows if row.summary.axes.numjobs > 1]
    if not several:
        return None
    rows = [_row(group, row) for row in several]
    known = any(sample.jobs_done_s for row in several for sample in row.samples)
    dots = _EVERY if known else _ENDS
    return Chart(
        name=group.slug("jobs"),
        title=f"When the processes of each {group.name} are done",
        alt=f"First and last process done, medians: {'; '.join(map(_spoken, rows))}.",
        caption=f"The bar is from the median of the first to that of the last, the result. {dots}",
        spec=spread_spec(rows, axis="done after, s", words=_WORDS, zero=True),
        numbers=_numbers(group, several),
    )


def stragglers(sample: Sample) -> list[int]:
    """Return the processes of one sample that take more than 1.2 times its median."""
    if not sample.jobs_done_s:
        return []
    limit = STRAGGLER * median(sample.jobs_done_s)
    return [job for job, done_s in enumerate(sample.jobs_done_s) if done_s > limit]


def _row(group: Group, row: RunRow) -> Spread:
    one = row.summary
    return Spread(
        label=group.label(row),
        figure=f"{format_seconds(one.first_done_s)} to {format_seconds(one.last_done_s)}",
        colour=row.colour,
        middle=one.last_done_s,
        bounds=(one.first_done_s, one.last_done_s),
        dots=[dot for sample in row.samples for dot in _dots(sample)],
        shape=row.shape,
        hollow=not row.counts,
    )


def _dots(sample: Sample) -> Iterator[Dot]:
    late = stragglers(sample)
    named = [(f"process {job}", done_s) for job, done_s in enumerate(sample.jobs_done_s)]
    ends = [("first", sample.first_done_s), ("last", sample.last_done_s)]
    for job, (name, done_s) in enumerate(named or ends):
        is_late = bool(named) and job in late
        words = (
            str(sample.repetition + 1),
            f"{name}, a straggler" if is_late else name,
            format_seconds(done_s),
        )
        yield Dot(
            x=done_s,
            words=dict(zip(_WORDS, words, strict=True)),
            shape=_SHAPE if is_late else "",
        )


def _spoken(row: Spread) -> str:
    return f"{row.label} {row.figure}"


def _numbers(group: Group, rows: Sequence[RunRow]) -> Grid:
    columns = (
        *(("writer", False), ("processes", True), ("first done (s)", True)),
        *(("last done (s)", True), ("stragglers", True)),
    )
    return Grid(
        columns=columns,
        rows=[
            [
                group.label(row),
                str(row.summary.axes.numjobs),
                f"{row.summary.first_done_s:.3f}",
                f"{row.summary.last_done_s:.3f}",
                _late(row.samples),
            ]
            for row in rows
        ],
    )


def _late(samples: Sequence[Sample]) -> str:
    if not any(one.jobs_done_s for one in samples):
        return "not recorded"
    late = sum(len(stragglers(one)) for one in samples)
    return f"{late} of {sum(len(one.jobs_done_s) for one in samples)}"
