"""When the processes of `--numjobs`, or the ranks, are done: first, last, and stragglers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from iobench.bench.judging.stats import rate
from iobench.report.grid import Grid
from iobench.report.page.charts.spread import Dot, Spread, spread_spec
from iobench.report.page.page import Chart
from iobench.report.page.rows import Group, RunRow
from iobench.report.ranks import RankRate, busy, stragglers
from iobench.results import Sample, WorldFacts
from iobench.units import GIB, format_rate, format_seconds

__all__ = ["jobs_chart"]

_SHAPE = "triangle-up"
_EVERY = "One dot per {}. Triangles are stragglers: above 1.2 times their sample's median."
_ENDS = "Dots are the first and the last process of each sample: this record has no others."


def jobs_chart(group: Group) -> Chart | None:
    """Return the chart of one operation; None where each row has one process."""
    several = [row for row in group.rows if row.summary.axes.numjobs > 1]
    if not several:
        return None
    rows = [_row(group, row) for row in several]
    known = any(sample.jobs_done_s for row in several for sample in row.samples)
    noun, nouns = ("process", "processes") if several[0].world is None else ("rank", "ranks")
    dots = _EVERY.format(noun) if known else _ENDS
    return Chart(
        name=group.slug("jobs"),
        title=f"When the {nouns} of each {group.name} are done",
        alt=f"First and last {noun} done, medians: {'; '.join(map(_spoken, rows))}.",
        caption=f"The bar is from the median of the first to that of the last, the result. {dots}",
        spec=spread_spec(rows, axis="done after, s", words=tuple(rows[0].dots[0].words), zero=True),
        numbers=_numbers(group, several),
    )


def _row(group: Group, row: RunRow) -> Spread:
    one = row.summary
    return Spread(
        label=group.label(row),
        figure=f"{format_seconds(one.first_done_s)} to {format_seconds(one.last_done_s)}",
        colour=row.colour,
        middle=one.last_done_s,
        bounds=(one.first_done_s, one.last_done_s),
        dots=[dot for sample in row.samples for dot in _dots(sample, row.world)],
        shape=row.shape,
        hollow=not row.counts,
    )


def _dots(sample: Sample, world: WorldFacts | None) -> Iterator[Dot]:
    late = stragglers(sample)
    noun = "process" if world is None else "rank"
    named = [(job, f"{noun} {job}", sample.jobs_done_s[job]) for job in busy(sample)]
    ends = [(0, "first", sample.first_done_s), (1, "last", sample.last_done_s)]
    for job, name, done_s in named or ends:
        is_late = bool(named) and job in late
        words = {
            "repetition": str(sample.repetition + 1),
            noun: f"{name}, a straggler" if is_late else name,
            "done after": format_seconds(done_s),
        }
        if world is not None:
            words |= {"host": world.hosts[job], "rate": _rate(sample, job)}
        yield Dot(x=done_s, words=words, shape=_SHAPE if is_late else "")


def _rate(sample: Sample, rank: int) -> str:
    return format_rate(rate(sample.jobs_bytes[rank], sample.jobs_done_s[rank]))


def _spoken(row: Spread) -> str:
    return f"{row.label} {row.figure}"


def _numbers(group: Group, rows: Sequence[RunRow]) -> Grid:
    columns = (
        *(("writer", False), ("processes", True), ("first done (s)", True)),
        *(("last done (s)", True), ("stragglers", True)),
    )
    if all(row.summary.ranks for row in rows):
        return _rates_of_ranks(group, rows)
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
    return f"{late} of {sum(len(busy(one)) for one in samples)}"


def _rates_of_ranks(group: Group, rows: Sequence[RunRow]) -> Grid:
    """Return the table of a run over ranks: the range of their rates, and the stragglers."""
    columns = (
        *(("writer", False), ("ranks", True), ("first done (s)", True), ("last done (s)", True)),
        *(("slowest rank", False), ("GiB/s", True), ("median", True), ("fastest rank", False)),
        *(("GiB/s", True), ("stragglers", False)),
    )
    cells = []
    for row in rows:
        one, ranks = row.summary, row.summary.ranks
        assert ranks is not None
        cells.append(
            [
                *(group.label(row), str(one.axes.numjobs)),
                *(f"{one.first_done_s:.3f}", f"{one.last_done_s:.3f}"),
                *_named(ranks.slowest),
                f"{ranks.median_bytes_per_s / GIB:.2f}",
                *_named(ranks.fastest),
                ", ".join(
                    f"{late.rank} ({late.host}): {late.samples} of {one.samples}"
                    for late in ranks.stragglers
                )
                or "none",
            ]
        )
    return Grid(columns=columns, rows=cells)


def _named(one: RankRate) -> tuple[str, str]:
    return f"{one.rank} ({one.host})", f"{one.bytes_per_s / GIB:.2f}"
