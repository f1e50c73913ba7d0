"""The meaning of a training record: exact figures from blocks with known values; arms by their
text."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from iobench.errors import UsageError
from iobench.report.render import render
from iobench.report.train import train_document
from iobench.results import ResultFile, TrainBlock, TrainSave, from_record, read, to_record
from iobench.train.arm import choose_arms
from iobench.train.costs import training_costs
from iobench.train.trainer import Trainer

_EXAMPLE = Path(__file__).parents[1] / "results/example.jsonl"
_NONE = TrainBlock(
    run_id="r",
    repetition=0,
    order=0,
    writer="",
    options={},
    mode="none",
    slots=None,
    bytes=1000,
    wall_s=4.0,
    step_s=(1.0, 1.0, 1.0, 1.0),
    persisting=(False,) * 4,
    saves=(),
    peak_memory_bytes=5,
    peak_dirty_bytes=None,
    losses_equal=True,
    started_at="2026-01-31T12:00:00.000Z",
)
_ASYNC = replace(
    _NONE,
    order=1,
    writer="hybrid",
    mode="async",
    slots=2,
    wall_s=5.0,
    step_s=(1.0, 1.5, 1.5, 1.0),
    persisting=(False, True, True, False),
    saves=(
        TrainSave(step=1, status="committed", stall_s=0.5, persist_s=3.0),
        TrainSave(step=3, status="dropped", stall_s=0.5, persist_s=None),
    ),
    resumed_equal=False,
)


def _file(*blocks: TrainBlock) -> ResultFile:
    return replace(read(_EXAMPLE), samples=(), training=blocks)


def test_costs() -> None:
    """Stall, slow-down and overhead of one arm, exactly."""
    again = [replace(one, repetition=1, wall_s=8.0) for one in (_NONE, _ASYNC)]
    plain, cost = training_costs(_file(_NONE, _ASYNC, again[1], again[0]))
    assert (plain.label, plain.step_s, plain.overhead, plain.stall_s) == ("none", 1.0, None, None)
    assert cost.label == "hybrid async=2"
    assert (cost.step_s, cost.persisting_step_s, cost.slowdown) == (1.0, 1.5, 0.5)
    assert (cost.stall_s, cost.persist_s, cost.snapshot_bytes_per_s) == (0.5, 3.0, 2000.0)
    assert cost.overhead == pytest.approx((5 / 4 * 8 / 8) ** 0.5 - 1)
    assert cost.overhead_ci95 is not None
    assert cost.overhead_ci95.low == pytest.approx(0.0)
    assert cost.overhead_ci95.high == pytest.approx(0.25)
    assert (cost.saves, cost.committed) == (4, 2)
    assert cost.resumed_equal is False
    assert (cost.peak_memory_bytes, cost.peak_dirty_bytes) == (5, None)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [(1, "undecided: 1 pair, 5 needed"), (4, "undecided: 4 pairs, 5 needed"), (5, "+25.0% to")],
)
def test_few_pairs_leave_an_overhead_undecided(pairs: int, said: str) -> None:
    """The heading of the intervals has the confidence that 5 pairs reach."""
    blocks = [replace(one, repetition=n) for n in range(pairs) for one in (_NONE, _ASYNC)]
    plan = {"every": 2, "steps": 4, "simulated_s": 0.0, "memcpy_bytes_per_s": 1e9}
    record, table = _file(*blocks), io.StringIO()
    planned = replace(record, run=replace(record.run, plan=plan))
    render(train_document(planned), "table", table)
    assert said in table.getvalue()
    assert ("95% interval", "94% interval")[pairs >= 5] in table.getvalue()
    assert f"{pairs} block{'s' * (pairs > 1)} of each; " in table.getvalue()


def test_a_budget() -> None:
    """Its stall is compared with the time for all but the budget at the rate of the writes."""
    half = replace(_ASYNC, budget_bytes=500)
    whole, cost = training_costs(_file(_ASYNC, half))
    assert (whole.least_stall_s, cost.least_stall_s) == (None, 1.5)
    assert (cost.label, cost.snapshot_bytes_per_s) == ("hybrid async=2 budget=500", None)
    assert from_record(to_record(half)) == half
    plan = {"every": 2, "steps": 4, "simulated_s": 0.0, "memcpy_bytes_per_s": 1e9}
    record, table = _file(_NONE, half), io.StringIO()
    render(
        train_document(replace(record, run=replace(record.run, plan=plan))),
        "table",
        table,
    )
    assert "1.5 s for all but the budget at the rate of its writes; its stall is 0.33" in " ".join(
        table.getvalue().split()
    )


def test_cut_off() -> None:
    """If the record ends before the partner block of an arm, there is no overhead and no error."""
    (cost,) = training_costs(_file(_ASYNC))
    assert (cost.overhead, cost.slowdown) == (None, None)
    assert training_costs(_file()) == []


def test_arms() -> None:
    """Writers times modes, `none` first and once. A mode that a peer lacks is named."""
    modes = "async,none,lazy=1,memory=3,spill=3"
    arms, left_out = choose_arms("buffered,peer:torch-save,crc=false", modes)
    assert [arm.label for arm in arms] == [
        "none",
        "buffered async=2",
        "buffered lazy=1",
        "buffered memory=3",
        "buffered spill=3",
        "peer:torch-save,crc=false async",
    ]
    assert left_out == [
        f"peer:torch-save has no {mode} mode" for mode in ("lazy", "memory", "spill")
    ]
    assert [arm.memory_bytes(7) for arm in arms] == [0, 14, 7, 21, 63, 7]
    limited, _ = choose_arms("buffered,peer:torch-save", "sync,async=3,lazy", "1KiB,2MiB")
    assert [arm.label for arm in limited[2:]] == [
        *(f"buffered async=3 budget={size}" for size in ("1KiB", "2MiB")),
        *(f"buffered lazy=2 budget={size}" for size in ("1KiB", "2MiB")),
        *("peer:torch-save sync", "peer:torch-save async"),
    ]
    assert [arm.memory_bytes(500) for arm in limited[2:4]] == [1024, 1500]
    for wrong in ("", "async=0", "async=x", "none=1"):
        with pytest.raises(UsageError, match="lazy, memory or spill"):
            choose_arms("buffered", wrong)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
def test_rewind(parts: int) -> None:
    """Training again after `rewind` gives the same losses and the same ballast."""
    trainer = Trainer(100_000, ballast_bytes=1000)
    trainer.step()
    trainer.change_in_parts(parts)
    start = trainer.state()["ballast"].clone()
    losses = [trainer.step() for _ in range(5)]
    end = trainer.state()["ballast"].clone()
    assert not end.equal(start)
    trainer.rewind()
    assert trainer.state()["ballast"].equal(start)
    assert [trainer.step() for _ in range(5)] == losses
    assert trainer.state()["ballast"].equal(end)
