"""The statistics of training with checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

from iobench.results import read
from iobench.stats.estimates import median_interval
from iobench.train.costs import training_costs

_RECORD = Path(__file__).parents[3] / "results/reference-train-busy-gpt5b-nemo.jsonl"


def test_a_block_counts_once_in_the_interval_of_the_stall() -> None:
    """Its saves share the state of the machine: pooled, they would make the interval too narrow."""
    found = read(_RECORD)
    for cost in training_costs(found):
        blocks = [
            one
            for one in found.training
            if (one.writer, one.mode, one.slots) == (cost.writer, cost.mode, cost.slots)
        ]
        stalls = [median([save.stall_s for save in one.saves]) for one in blocks if one.saves]
        if not stalls:
            assert cost.stall_s is None
            continue
        assert cost.stall_s == median(stalls)
        assert cost.stall_s_ci95 == median_interval(stalls)


def test_skipped_saves_stall_nothing() -> None:
    block = next(one for one in read(_RECORD).training if one.saves)
    skipped = replace(block, saves=tuple(replace(one, status="skipped") for one in block.saves))
    assert skipped.stall_s is None
    assert block.stall_s is not None
