"""The page of a record of `iobench train`: what checkpoints cost, and the steps over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from iobench.bench.judging.comparison import LEAST_SAMPLES
from iobench.bench.judging.stats import median
from iobench.errors import UsageError
from iobench.report.answer import Line
from iobench.report.grid import Grid
from iobench.report.page.charts.spread import Dot, MarkLine, Spread, spread_spec
from iobench.report.page.charts.timeline import Timeline, timeline_chart
from iobench.report.page.environment import environment_section, repeat_section
from iobench.report.page.page import Attachment, Chart, Page, Section
from iobench.report.page.palette import colour_of, shape_of
from iobench.report.page.rows import moment
from iobench.report.page.tables import charts_section, spread_words, tables_section
from iobench.report.training import (
    TrainingCost,
    answer,
    blocks_by_arm,
    grid,
    heading,
    notes,
    training_costs,
)
from iobench.report.wording import environment_line
from iobench.results import ResultFile, TrainBlock
from iobench.units import format_seconds

__all__ = ["train_page"]

_WITHOUT = "#8b93a1"  # blocks without checkpoints


def train_page(results: Sequence[ResultFile]) -> Page:
    """Return the page of one record. Raises UsageError for several."""
    if len(results) > 1:
        raise UsageError("one report shows one record of iobench train; give them one by one")
    (result,) = results
    arms = list(zip(training_costs(result), blocks_by_arm(result), strict=True))
    when = moment(result.run.started_at)
    caveats = (Line("Stopped", (result.incomplete,)),) if result.incomplete else ()
    return Page(
        kind="iobench train",
        title=heading(result),
        about=(environment_line(result.run), f"measured {when}"),
        answer=tuple(answer(result)),
        caveats=caveats,
        sections=(
            *charts_section("What checkpoints cost", _costs(arms)),
            _steps_section(result),
            tables_section([grid(result)], notes(result)),
            environment_section(result.run),
            repeat_section(result.run),
        ),
        attachments=(Attachment.of(result.path),),
    )


def _costs(arms: Sequence[tuple[TrainingCost, Sequence[TrainBlock]]]) -> Iterator[Chart]:
    plain = {one.repetition: one.wall_s for cost, own in arms if cost.mode == "none" for one in own}
    saving = [(cost, own) for cost, own in arms if cost.mode != "none"]
    over = [_overhead(cost, own, plain) for cost, own in saving if cost.overhead is not None]
    over.sort(key=lambda row: row.middle or 0.0)
    if over:
        pairs = spread_words(cost.pairs for cost, _ in saving if cost.pairs)
        yield Chart(
            name="overhead",
            title="What checkpoints add to the wall clock of training",
            alt=f"Overhead, the least first: {_spoken(over)}.",
            caption="One dot per block, compared with the block without checkpoints of the same "
            f"repetition; {pairs} Triangles are beyond the axis.",
            spec=spread_spec(over, axis="added, %", words=_WORDS, mark=_NOTHING),
            numbers=_numbers(over, "added, %"),
        )
    stalls = [_stall(cost, own) for cost, own in saving if cost.stall_s is not None]
    stalls.sort(key=lambda row: row.middle or 0.0)
    if stalls:
        taken = spread_words(len(row.dots) for row in stalls)
        yield Chart(
            name="stall",
            title="How long a checkpoint stops training",
            alt=f"Stall of each checkpoint, the shortest first: {_spoken(stalls)}.",
            caption=f"One dot per checkpoint; {taken} Triangles are beyond the axis.",
            spec=spread_spec(stalls, axis="stall, ms", words=_WORDS, zero=True),
            numbers=_numbers(stalls, "stall, ms"),
        )


_WORDS = ("repetition", "figure", "blocks")
_NOTHING = MarkLine(x=0.0, label="no checkpoints")


def _overhead(cost: TrainingCost, blocks: Sequence[TrainBlock], plain: dict[int, float]) -> Spread:
    held = cost.overhead_ci95
    dots = [
        _dot(
            one.repetition,
            100 * (one.wall_s / base - 1),
            "%",
            f"{one.wall_s:.3f} s, {base:.3f} s without",
        )
        for one in blocks
        if (base := plain.get(one.repetition)) is not None
    ]
    return Spread(
        label=cost.label,
        figure=f"{100 * (cost.overhead or 0.0):+.1f}%"
        + (", undecided" if cost.pairs < LEAST_SAMPLES else ""),
        colour=colour_of(cost.writer),
        shape=shape_of(cost.writer),
        middle=100 * (cost.overhead or 0.0),
        bounds=(100 * held.low, 100 * held.high) if held else None,
        dots=dots,
    )


def _stall(cost: TrainingCost, blocks: Sequence[TrainBlock]) -> Spread:
    held, stall_s = cost.stall_s_ci95, cost.stall_s or 0.0
    return Spread(
        label=cost.label,
        figure=format_seconds(stall_s),
        colour=colour_of(cost.writer),
        shape=shape_of(cost.writer),
        middle=1e3 * stall_s,
        bounds=(1e3 * held.low, 1e3 * held.high) if held else None,
        dots=[
            _dot(block.repetition, 1e3 * one.stall_s, " ms", f"step {one.step}, {one.status}")
            for block in blocks
            for one in block.saves
            if one.status != "skipped"
        ],
    )


def _dot(repetition: int, value: float, unit: str, words: str) -> Dot:
    shown = (str(repetition + 1), f"{value:.3g}{unit}", words)
    return Dot(x=value, words=dict(zip(_WORDS, shown, strict=True)))


def _steps_section(result: ResultFile) -> Section:
    """Return the charts of steps, stalls and memory over time."""
    arms = list(zip(training_costs(result), blocks_by_arm(result), strict=True))
    return Section(
        heading="Steps over time",
        paragraphs=("Of each, the block whose duration is the median.",) if arms else (),
        charts=tuple(_timelines(arms)),
    )


def _timelines(arms: Sequence[tuple[TrainingCost, Sequence[TrainBlock]]]) -> Iterator[Chart]:
    lines = [
        Timeline(
            label="without checkpoints" if cost.mode == "none" else cost.label,
            colour=_WITHOUT if cost.mode == "none" else colour_of(cost.writer),
            block=_typical(blocks),
        )
        for cost, blocks in arms
    ]
    ends = [row["x2"] for line in lines for row in (*line.steps(), *line.saves())]
    steps = [step_s for line in lines for step_s in line.block.step_s]
    end_s, slowest_s = max(ends, default=1.0), max(steps, default=1.0)
    for number, line in enumerate(lines):
        name = f"steps-{number + 1}"
        yield timeline_chart(line, name=name, end_s=end_s, slowest_s=slowest_s)


def _typical(blocks: Sequence[TrainBlock]) -> TrainBlock:
    """Return the block whose duration is nearest to the median."""
    middle = median([one.wall_s for one in blocks])
    return min(blocks, key=lambda one: abs(one.wall_s - middle))


def _spoken(rows: Sequence[Spread]) -> str:
    return "; ".join(f"{row.label} {row.figure}" for row in rows)


def _numbers(rows: Sequence[Spread], unit: str) -> Grid:
    columns = (("checkpoints", False), (unit, True), ("interval", True), ("samples", False))
    return Grid(
        columns=columns,
        rows=[
            [
                row.label,
                f"{row.middle:.4g}",
                f"{row.bounds[0]:.4g} to {row.bounds[1]:.4g}" if row.bounds else "-",
                " ".join(f"{dot.x:.4g}" for dot in row.dots),
            ]
            for row in rows
        ],
    )
