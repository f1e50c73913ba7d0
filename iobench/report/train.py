"""The document of a record of `iobench train`: what checkpoints cost, for each arm."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from iobench.errors import ResultFileError, UsageError
from iobench.report.document import Chart, Document, Dot, Line, MarkLine, Section, Spread
from iobench.report.facts import environment_line, environment_section, repeat_section
from iobench.report.grid import Grid
from iobench.report.palette import colour_of, shape_of
from iobench.report.rows import moment, spread_words
from iobench.results import ResultFile, TrainBlock, to_plain
from iobench.results.setting import labels
from iobench.stats.comparison import LEAST_SAMPLES, compare_pairs, few_pairs
from iobench.stats.estimates import (
    Interval,
    highest,
    interval_heading,
    median,
    median_interval,
)
from iobench.units import (
    GIB,
    DurationForm,
    count_of,
    duration_form,
    format_rate,
    format_seconds,
    format_size,
    format_size_exact,
)

__all__ = ["SCHEMA", "TrainingCost", "train_document", "training_costs"]

SCHEMA = "iobench.train/2"

_MISSING = "-"
_INTERVAL = "95%\ninterval"  # its heading has the confidence that the pairs reach
_COLUMNS = (
    ("checkpoints", False),
    ("step", True),
    ("step while\npersisting", True),
    ("stall", True),
    ("snapshot\nGiB/s", True),
    ("persist", True),
    ("overhead", True),
    (_INTERVAL, True),
    ("peak\nmemory", True),
    ("peak\ndirty", True),
    ("committed", True),
    ("same\nlosses", False),
    ("same after\nresume", False),
)
_DROPPED_FIRST = (
    *("snapshot\nGiB/s", "peak\ndirty", "peak\nmemory", "committed", "step while\npersisting"),
    *("same after\nresume", "same\nlosses", "persist"),
)
_DURATIONS = ("step_s", "persisting_step_s", "stall_s", "persist_s")
_WITHOUT = "#8b93a1"  # blocks without checkpoints


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """One arm compared with the blocks without checkpoints: medians over all blocks, in seconds.

    `stall_s` is the median of the blocks' own medians, and its interval that of so many blocks:
    the saves of one block share the state of the machine.

    `step_s` is the time of a step while nothing is persisted, `persisting_step_s` that of a step
    while a checkpoint is persisted; None without such steps. `slowdown` is `persisting_step_s` over
    the median step without checkpoints, less 1.

    `overhead` is the wall clock of a block over that of the block without checkpoints in the same
    repetition, less 1. It is computed from `pairs` such pairs. `overhead_ci95` has the
    confidence that so many pairs reach, 95% at most. `snapshot_bytes_per_s` is a checkpoint's
    size over its stall, for modes whose stall is a copy. `least_stall_s`: with a budget below the
    checkpoint, the rest of it at the rate of the arm's own background writes.
    """

    label: str
    writer: str
    mode: str
    slots: int | None
    budget_bytes: int | None
    blocks: int
    pairs: int
    step_s: float | None
    persisting_step_s: float | None
    slowdown: float | None
    stall_s: float | None
    stall_s_ci95: Interval | None
    least_stall_s: float | None
    persist_s: float | None
    snapshot_bytes_per_s: float | None
    overhead: float | None
    overhead_ci95: Interval | None
    peak_memory_bytes: int | None
    peak_dirty_bytes: int | None
    saves: int
    committed: int
    losses_equal: bool
    resumed_equal: bool | None


_Arms = Sequence[tuple[TrainingCost, Sequence[TrainBlock]]]


def training_costs(result: ResultFile) -> list[TrainingCost]:
    """Return a row per arm in the order of the first repetition, including unfinished arms."""
    arms = blocks_by_arm(result)
    names = labels(blocks[0].setting for blocks in arms)
    plain = next((blocks for blocks in arms if blocks[0].mode == "none"), [])
    return [_cost(name, blocks, plain) for name, blocks in zip(names, arms, strict=True)]


def blocks_by_arm(result: ResultFile) -> list[list[TrainBlock]]:
    """Return the blocks of each arm, in the order of `training_costs`."""
    arms: dict[str, list[TrainBlock]] = {}
    for block in result.training:
        arms.setdefault(json.dumps(_arm(block), sort_keys=True), []).append(block)
    return list(arms.values())


def _arm(block: TrainBlock) -> list[Any]:
    return [block.writer, to_plain(block.options), block.mode, block.slots, block.budget_bytes]


def _cost(name: str, blocks: Sequence[TrainBlock], plain: Sequence[TrainBlock]) -> TrainingCost:
    first = blocks[0]
    mode, budget = f"{first.mode}={first.slots}" if first.slots else first.mode, first.budget_bytes
    if budget is not None:
        mode += f" budget={format_size_exact(budget)}"
    quiet, busy = _steps(blocks, persisting=False), _steps(blocks, persisting=True)
    base, saves = _steps(plain, persisting=False), [save for one in blocks for save in one.saves]
    stalls = [one.stall_s for one in blocks if one.stall_s is not None]
    stall_s = _median(stalls)
    persist_s = _median([save.persist_s for save in saves if save.persist_s is not None])
    through = budget is not None and budget < first.bytes
    wall = None if first.mode == "none" else compare_pairs(_walls(blocks), _walls(plain))
    ratio = wall and wall.ratio
    resumed = [one.resumed_equal for one in blocks if one.resumed_equal is not None]
    return TrainingCost(
        label=f"{name} {mode}".strip(),
        writer=first.writer,
        mode=first.mode,
        slots=first.slots,
        budget_bytes=budget,
        blocks=len(blocks),
        pairs=ratio.samples if ratio else 0,
        step_s=_median(quiet),
        persisting_step_s=_median(busy),
        slowdown=median(busy) / median(base) - 1 if busy and base else None,
        stall_s=stall_s,
        stall_s_ci95=median_interval(stalls) if stalls else None,
        least_stall_s=(1 - (budget or 0) / first.bytes) * persist_s
        if through and persist_s
        else None,
        persist_s=persist_s,
        snapshot_bytes_per_s=first.bytes / stall_s
        if stall_s and first.mode == "async" and not through
        else None,
        overhead=ratio.ratio - 1 if ratio else None,
        overhead_ci95=Interval(ratio.interval.low - 1, ratio.interval.high - 1)
        if ratio and ratio.interval
        else None,
        peak_memory_bytes=highest([one.peak_memory_bytes for one in blocks]),
        peak_dirty_bytes=highest([one.peak_dirty_bytes for one in blocks]),
        saves=len(saves),
        committed=sum(save.status == "committed" for save in saves),
        losses_equal=all(one.losses_equal for one in blocks),
        resumed_equal=all(resumed) if resumed else None,
    )


def _walls(blocks: Sequence[TrainBlock]) -> dict[int, float]:
    return {one.repetition: one.wall_s for one in blocks}


def _steps(blocks: Sequence[TrainBlock], *, persisting: bool) -> list[float]:
    return [
        step_s
        for block in blocks
        for step_s, is_persisting in zip(block.step_s, block.persisting, strict=True)
        if is_persisting == persisting
    ]


def train_document(results: Sequence[ResultFile]) -> Document:
    """Return the document of one record. Raises UsageError for several."""
    if len(results) > 1:
        raise UsageError("one report shows one record of iobench train; give them one by one")
    (result,) = results
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
        draw=partial(_sections, arms),
        appendix=(environment_section(run), repeat_section(run)),
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
    """Return what checkpoints add to the wall clock: the least, and the most."""
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
    held = cost.overhead_ci95
    span = f" ({_percent(held.low)} to {_percent(held.high)})" if held else ""
    return f"{_percent(cost.overhead)}{span}"


def _stall(costs: Sequence[TrainingCost]) -> Line:
    """Return for how long a checkpoint stops training: the shortest, and the longest."""
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
    """Return the table of costs."""
    forms = {
        name: duration_form(getattr(cost, name) or 0.0 for cost in costs) for name in _DURATIONS
    }
    shown = interval_heading(cost.pairs for cost in costs if cost.pairs >= LEAST_SAMPLES)
    return Grid(
        columns=tuple((shown if c[0] == _INTERVAL else c[0], c[1]) for c in _COLUMNS),
        rows=[list(_row(cost, forms)) for cost in costs],
        drop=tuple(i for name in _DROPPED_FIRST for i, c in enumerate(_COLUMNS) if c[0] == name),
    )


def _row(cost: TrainingCost, forms: Mapping[str, DurationForm]) -> Iterator[str]:
    none = cost.mode == "none"
    times = {
        name: _MISSING if (value := getattr(cost, name)) is None else form(value)
        for name, form in forms.items()
    }
    yield cost.label
    yield times["step_s"]
    busy = times["persisting_step_s"]
    yield busy if busy == _MISSING else f"{busy} ({_percent(cost.slowdown)})"
    yield times["stall_s"]
    rate = cost.snapshot_bytes_per_s
    yield _MISSING if rate is None else f"{rate / GIB:.2f}"
    yield times["persist_s"]
    yield _percent(cost.overhead)
    held = cost.overhead_ci95
    if 0 < cost.pairs < LEAST_SAMPLES:
        yield f"undecided: {few_pairs(cost.pairs)}"
    else:
        yield f"{_percent(held.low)} to {_percent(held.high)}" if held else _MISSING
    yield _size(cost.peak_memory_bytes)
    yield _size(cost.peak_dirty_bytes)
    yield _MISSING if none else f"{cost.committed} of {cost.saves}"
    yield _yes(cost.losses_equal)
    yield _yes(cost.resumed_equal)


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
    return _MISSING if value is None else f"{value:+.1%}"


def _size(value: int | None) -> str:
    return _MISSING if value is None else format_size(value)


def _yes(value: bool | None) -> str:
    return _MISSING if value is None else "yes" if value else "NO"


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


# Charts.


def _sections(arms: _Arms) -> Iterator[Section]:
    yield Section(heading="What checkpoints cost", charts=tuple(_costs(arms)))
    says = ("Of each, the block whose duration is the median.",)
    yield Section(heading="Steps over time", paragraphs=says, charts=tuple(_timelines(arms)))


def _costs(arms: _Arms) -> Iterator[Chart]:
    from iobench.report.charts.spread import spread_chart

    plain = {one.repetition: one.wall_s for cost, own in arms if cost.mode == "none" for one in own}
    saving = [(cost, own) for cost, own in arms if cost.mode != "none"]
    over = [_overhead_row(cost, own, plain) for cost, own in saving if cost.overhead is not None]
    over.sort(key=lambda row: row.middle or 0.0)
    if over:
        pairs = spread_words(cost.pairs for cost, _ in saving if cost.pairs)
        yield spread_chart(
            over,
            name="overhead",
            title="What checkpoints add to the wall clock of training",
            says="Overhead, the least first",
            caption="One dot per block, compared with the block without checkpoints of the same "
            f"repetition; {pairs} Triangles are beyond the axis.",
            axis="added, %",
            mark=MarkLine(x=0.0, label="no checkpoints"),
        )
    stalls = [_stall_row(cost, own) for cost, own in saving if cost.stall_s is not None]
    stalls.sort(key=lambda row: row.middle or 0.0)
    if stalls:
        taken = spread_words(len(row.dots) for row in stalls)
        yield spread_chart(
            stalls,
            name="stall",
            title="How long a checkpoint stops training",
            says="Stall of each checkpoint, the shortest first",
            caption=f"One dot per checkpoint; {taken} Triangles are beyond the axis.",
            axis="stall, ms",
            zero=True,
        )


def _overhead_row(
    cost: TrainingCost, blocks: Sequence[TrainBlock], plain: dict[int, float]
) -> Spread:
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
            _dot(block.repetition, 1e3 * one.stall_s, " ms", f"step {one.step}, {one.status}")
            for block in blocks
            for one in block.saves
            if one.status != "skipped"
        ],
    )


def _dot(repetition: int, value: float, unit: str, words: str) -> Dot:
    shown = {"repetition": str(repetition + 1), "figure": f"{value:.3g}{unit}", "blocks": words}
    return Dot(x=value, words=shown)


def _timelines(arms: _Arms) -> Iterator[Chart]:
    from iobench.report.charts.timeline import Timeline, timeline_chart

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
