"""Cost of checkpoints to training for each arm, from the record of `iobench train`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from iobench.bench.judging.comparison import LEAST_SAMPLES
from iobench.bench.judging.stats import (
    Interval,
    highest,
    interval_heading,
    median,
    median_interval,
    paired_log_ratio,
)
from iobench.claims.answer import few_pairs
from iobench.errors import ResultFileError
from iobench.report.answer import Line
from iobench.report.durations import DurationForm, duration_form
from iobench.report.grid import Grid
from iobench.report.render import DocumentFormat, write_grids, write_json
from iobench.results import ResultFile, TrainBlock, to_plain
from iobench.results.labels import labels
from iobench.units import GIB, count_of, format_rate, format_seconds, format_size

__all__ = [
    "SCHEMA",
    "TrainingCost",
    "answer",
    "blocks_by_arm",
    "grid",
    "heading",
    "notes",
    "training_costs",
    "write",
]

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
    size over its stall, for modes whose stall is a copy.
    """

    label: str
    writer: str
    mode: str
    slots: int | None
    blocks: int
    pairs: int
    step_s: float | None
    persisting_step_s: float | None
    slowdown: float | None
    stall_s: float | None
    stall_s_ci95: Interval | None
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
    return [block.writer, to_plain(block.options), block.mode, block.slots]


def _cost(name: str, blocks: Sequence[TrainBlock], plain: Sequence[TrainBlock]) -> TrainingCost:
    first = blocks[0]
    mode = f"{first.mode}={first.slots}" if first.slots else first.mode
    quiet, busy = _steps(blocks, persisting=False), _steps(blocks, persisting=True)
    base, saves = _steps(plain, persisting=False), [save for one in blocks for save in one.saves]
    stalls = [one.stall_s for one in blocks if one.stall_s is not None]
    stall_s = _median(stalls)
    walls = {one.repetition: one.wall_s for one in plain}
    pairs = [(one.wall_s, walls[one.repetition]) for one in blocks if one.repetition in walls]
    ratio = None
    if pairs and first.mode != "none":
        ratio = paired_log_ratio([own for own, _ in pairs], [wall for _, wall in pairs])
    resumed = [one.resumed_equal for one in blocks if one.resumed_equal is not None]
    return TrainingCost(
        label=f"{name} {mode}".strip(),
        writer=first.writer,
        mode=first.mode,
        slots=first.slots,
        blocks=len(blocks),
        pairs=ratio.samples if ratio else 0,
        step_s=_median(quiet),
        persisting_step_s=_median(busy),
        slowdown=median(busy) / median(base) - 1 if busy and base else None,
        stall_s=stall_s,
        stall_s_ci95=median_interval(stalls) if stalls else None,
        persist_s=_median([save.persist_s for save in saves if save.persist_s is not None]),
        snapshot_bytes_per_s=first.bytes / stall_s if stall_s and first.mode == "async" else None,
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


def _steps(blocks: Sequence[TrainBlock], *, persisting: bool) -> list[float]:
    return [
        step_s
        for block in blocks
        for step_s, is_persisting in zip(block.step_s, block.persisting, strict=True)
        if is_persisting == persisting
    ]


def write(result: ResultFile, form: DocumentFormat, stream: TextIO) -> None:
    """Write heading, table and notes; or JSON: the arms with unrounded numbers, the run's plan."""
    if form is not DocumentFormat.JSON:
        write_grids(form, _words(result), [grid(result)], notes(result), stream)
        return
    document = {
        "schema": SCHEMA,
        "record": str(result.path),
        "run": to_plain(result.run),
        "incomplete": result.incomplete,
        "arms": [asdict(cost) for cost in training_costs(result)],
    }
    write_json(document, stream)


def _words(result: ResultFile) -> Iterator[str]:
    """Yield the answer in aligned lines, and the heading."""
    lines = answer(result)
    width = max((len(line.subject) for line in lines), default=0) + 2
    for line in lines:
        for number, text in enumerate(line.texts):
            yield f"{'' if number else f'{line.subject}:':<{width}}{text}"
    yield heading(result)


def answer(result: ResultFile) -> list[Line]:
    """Return the lines Overhead, Stall and Losses: the best arm and the worst one."""
    costs = [cost for cost in training_costs(result) if cost.mode != "none"]
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


def grid(result: ResultFile) -> Grid:
    """Return the table of costs."""
    costs = training_costs(result)
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
    fewest = min((cost.blocks for cost in training_costs(result)), default=0)
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
