"""The document of a record of `iobench train`: what checkpoints cost, for each arm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from iobench.errors import ResultFileError
from iobench.report.document import Chart, Document, Dot, Line, Section, Spread
from iobench.report.facts import environment_line, environment_section, moment, repeat_section
from iobench.report.grid import MISSING, Column, Grid, shown, span
from iobench.report.palette import colour_of, shape_of
from iobench.results import ResultFile, TrainBlock, to_plain
from iobench.stats.comparison import LEAST_SAMPLES, few_pairs
from iobench.stats.estimates import interval_heading
from iobench.train.costs import TrainingCost, blocks_by_arm, training_costs
from iobench.units import (
    count_of,
    duration_form,
    format_rate,
    format_seconds,
    format_size,
    in_gib,
)

SCHEMA = "iobench.train/2"


_Arms = Sequence[tuple[TrainingCost, Sequence[TrainBlock]]]


def train_document(result: ResultFile) -> Document:
    """Return the document of one record."""
    costs, run = training_costs(result), result.run
    stopped = [Line("Stopped", (result.incomplete,), caveat=True)] if result.incomplete else []
    arms = list(zip(costs, blocks_by_arm(result), strict=True))
    return Document(
        kind="iobench train",
        title=heading(result),
        about=(environment_line(run.environment), f"measured {moment(run.started_at)}"),
        answer=(*answer(costs), *stopped),
        tables=(grid(costs),),
        notes=tuple(notes(result)),
        data={
            "schema": SCHEMA,
            "record": str(result.path),
            "run": to_plain(run),
            "incomplete": result.incomplete,
            "arms": [asdict(cost) for cost in costs],
        },
        rows="arms",
        draw=lambda: [Section(heading="Stalls", charts=tuple(_stalls(arms)))],
        appendix=(environment_section(run), repeat_section(result)),
        records=(result.path,),
        incomplete=result.incomplete,
    )


def answer(arms: Sequence[TrainingCost]) -> list[Line]:
    """Return the lines Overhead, Stall and Losses: the best arm and the worst one."""
    costs = [cost for cost in arms if cost.mode != "none"]
    lines = [_overhead(costs), _stall(costs)]
    wrong = [c.label for c in costs if not c.losses_equal or c.resumed_equal is False]
    if wrong:
        lines.append(Line("Losses", (f"checkpoints changed them: {', '.join(wrong)}",)))
    return [line for line in lines if line.texts]


def _overhead(costs: Sequence[TrainingCost]) -> Line:
    known = [(cost.overhead, cost) for cost in costs if cost.overhead is not None]
    known.sort(key=lambda one: one[0])
    few = min((cost.pairs for _, cost in known), default=LEAST_SAMPLES)
    start = f"undecided ({few_pairs(few)}): " if few < LEAST_SAMPLES else ""
    texts = [f"{cost.label} {_spread(cost)}" for _, cost in (*known[:1], *known[1:][-1:])]
    return Line(
        "Overhead", tuple([f"{start}{texts[0]} of the wall clock", *texts[1:]] if texts else ())
    )


def _spread(cost: TrainingCost) -> str:
    """Return `+13.2% (+6.5% to +14.8%)`."""
    held = span(cost.overhead_ci95, _percent, " to ")
    return _percent(cost.overhead) + (f" ({held})" if cost.overhead_ci95 else "")


def _stall(costs: Sequence[TrainingCost]) -> Line:
    known = sorted((cost.stall_s, cost.label) for cost in costs if cost.stall_s is not None)
    texts = [
        f"{label} {format_seconds(stall_s)}" for stall_s, label in (*known[:1], *known[1:][-1:])
    ]
    return Line("Stall", tuple([f"{texts[0]} at each checkpoint", *texts[1:]] if texts else ()))


def heading(result: ResultFile) -> str:
    """Return workload, size and interval of the checkpoints, and the length of a block."""
    facts, plan = result.run.workload, _plan(result)
    every = "step" if plan["every"] == 1 else f"{plan['every']} steps"
    return (
        f"{facts.name}: checkpoints of {format_size(facts.bytes)} every {every}, "
        f"{plan['steps']} steps a block"
    )


def _plan(result: ResultFile) -> Mapping[str, Any]:
    """Return the plan. Raises ResultFileError unless it has the numbers of a training."""
    plan = result.run.plan
    for name in ("every", "steps", "simulated_s", "memcpy_bytes_per_s"):
        if not isinstance(plan.get(name), int | float):
            raise ResultFileError(
                f"{result.path}: {name} of its plan must be a number, and is "
                f"{plan.get(name)!r:.40}; take an unedited copy of the file"
            )
    return plan


def grid(costs: Sequence[TrainingCost]) -> Grid:
    """Return the table of costs. All durations of a column have one form."""

    def time(name: str) -> Callable[[TrainingCost], str]:
        form = duration_form(getattr(cost, name) or 0.0 for cost in costs)
        return lambda cost: shown(getattr(cost, name), form)

    busy = time("persisting_step_s")
    interval = interval_heading(cost.pairs for cost in costs if cost.pairs >= LEAST_SAMPLES)
    columns: tuple[Column[TrainingCost], ...] = (
        Column("checkpoints", lambda cost: cost.label, figure=False),
        Column("step", time("step_s")),
        Column("step while\npersisting", lambda cost: _slower(busy(cost), cost), 5),
        Column("stall", time("stall_s")),
        Column("snapshot\nGiB/s", lambda cost: shown(cost.snapshot_bytes_per_s, in_gib), 1),
        Column("persist", time("persist_s"), 8),
        Column("overhead", lambda cost: _percent(cost.overhead)),
        Column(interval, _interval),
        Column("peak\nmemory", lambda cost: shown(cost.peak_memory_bytes, format_size), 3),
        Column("peak\ndirty", lambda cost: shown(cost.peak_dirty_bytes, format_size), 2),
        Column("committed", _committed, 4),
        Column("same\nlosses", lambda cost: _yes(cost.losses_equal), 7, figure=False),
        Column("same after\nresume", lambda cost: _yes(cost.resumed_equal), 6, figure=False),
    )
    return Grid.of(costs, columns)


def _slower(step: str, cost: TrainingCost) -> str:
    return step if step == MISSING else f"{step} ({_percent(cost.slowdown)})"


def _interval(cost: TrainingCost) -> str:
    if 0 < cost.pairs < LEAST_SAMPLES:
        return f"undecided: {few_pairs(cost.pairs)}"
    return span(cost.overhead_ci95, _percent, " to ")


def _committed(cost: TrainingCost) -> str:
    return MISSING if cost.mode == "none" else f"{cost.committed} of {cost.saves}"


def notes(result: ResultFile) -> Iterator[str]:
    """Yield how the steps were paced, and what the figures are compared with."""
    plan = _plan(result)
    if plan["simulated_s"]:
        scaled = ", scaled as its checkpoint is" if plan.get("step_scaled") else ""
        # In older records forward and backward take all of it, and the update is added to it.
        what = "a step takes" if plan.get("simulates_whole_step") else "forward and backward take"
        yield (
            f"{what} {format_seconds(plan['simulated_s'])}, the workload's "
            f"published step time{scaled}; the CPU is idle during them"
        )
    if probe := plan.get("probe"):
        yield (
            f"checkpoints every {plan['every_asked']}, found before: {probe['arm']} persisted in "
            f"{format_seconds(probe['persist_s'])} and stalled "
            f"{format_seconds(probe['stall_s'])}, a step took {format_seconds(probe['step_s'])}"
        )
    yield f"a plain copy of memory: {format_rate(plan['memcpy_bytes_per_s'])}"
    costs = training_costs(result)
    for cost in costs:
        if cost.least_stall_s and cost.stall_s is not None:
            yield (
                f"{cost.label}: {format_seconds(cost.least_stall_s)} for all but the budget at the "
                f"rate of its writes; its stall is {cost.stall_s / cost.least_stall_s:.2f} of that"
            )
    fewest = min((cost.blocks for cost in costs), default=0)
    yield (
        f"{count_of(fewest, 'block')} of each; overhead: wall clock until the last checkpoint "
        "is durable, compared with the block without checkpoints of the same repetition"
    )


def _percent(value: float | None) -> str:
    return shown(value, "{:+z.1%}".format)


def _yes(value: bool | None) -> str:
    return shown(value, lambda one: "yes" if one else "NO")


def _stalls(arms: _Arms) -> Iterator[Chart]:
    from iobench.report.charts.spread import spread_chart

    rows = [_stall_row(cost, own) for cost, own in arms if cost.stall_s is not None]
    rows.sort(key=lambda row: row.middle)
    if rows:
        interval = interval_heading(len(row.dots) for row in rows).replace("\n", " ")
        yield spread_chart(
            rows,
            name="stall",
            title="How long a checkpoint stops training",
            says="Stall of each checkpoint, the shortest first",
            caption=f"One dot per checkpoint; upright line: median; bar: its {interval}. Triangles "
            "are beyond the axis.",
            axis="stall, ms",
        )


def _stall_row(cost: TrainingCost, blocks: Sequence[TrainBlock]) -> Spread:
    held, stall_s = cost.stall_s_ci95, cost.stall_s or 0.0
    return Spread(
        label=cost.label,
        figure=format_seconds(stall_s),
        colour=colour_of(cost.writer),
        shape=shape_of(cost.writer),
        middle=1e3 * stall_s,
        bounds=(1e3 * held.low, 1e3 * held.high) if held else None,
        dots=[
            Dot(
                x=1e3 * one.stall_s,
                words={
                    "repetition": str(block.repetition + 1),
                    "figure": f"{1e3 * one.stall_s:.3g} ms",
                    "save": f"step {one.step}, {one.status}",
                },
            )
            for block in blocks
            for one in block.saves
            if one.status != "skipped"
        ],
    )
