"""What checkpoints cost each arm of a training, computed from the blocks of its record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from iobench.results import ResultFile, TrainBlock, to_plain
from iobench.results.setting import labels
from iobench.stats.comparison import compare_pairs
from iobench.stats.estimates import Interval, highest, median, median_interval


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
    first, budget = blocks[0], blocks[0].budget_bytes
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
        label=f"{name} {first.how}".strip(),
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


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
