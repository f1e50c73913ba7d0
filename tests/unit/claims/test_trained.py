"""Claims about training, judged by blocks with figures chosen by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from iobench.claims.claims import Answer, ClaimFinding, Side, study
from iobench.claims.reproduction import judge_records
from iobench.errors import ResultFileError
from iobench.results import ResultFile, TrainBlock, TrainSave
from iobench.stats.estimates import median

_PLAN = {"verb": "train", "every": 10, "every_asked": "10", "simulated_s": 1.0, "steps": 30}


def block(
    side: Side, repetition: int, wall_s: float, stall_s: float = 1.0, **changed: Any
) -> TrainBlock:
    mode, _, slots = side.mode.partition("=")
    saves = (TrainSave(step=1, status="committed", stall_s=stall_s, persist_s=1.0),)
    values: dict[str, Any] = {
        "run_id": "r",
        "repetition": repetition,
        "order": 0,
        "writer": side.writer,
        "options": {},
        "mode": mode,
        "slots": int(slots) if slots else None,
        "bytes": 2**30,
        "wall_s": wall_s,
        "step_s": (1.0, 1.1),
        "persisting": (False, True),
        "saves": () if mode == "none" else saves,
        "peak_memory_bytes": None,
        "peak_dirty_bytes": None,
        "losses_equal": True,
        "started_at": "2026-01-31T12:00:00.000Z",
    }
    return TrainBlock(**(values | changed))


def judged(
    example: ResultFile, name: str, *blocks: TrainBlock, plan: Mapping[str, Any] = _PLAN
) -> list[ClaimFinding]:
    """The findings of the study for its first workload, from a record of 1 GiB of 12.55 GiB."""
    about = study(name)
    facts = replace(example.run.workload, name=about.workloads[0])
    run = replace(example.run, plan=plan, workload=facts)
    return judge_records(about, [replace(example, run=run, samples=(), training=blocks)])


def overheads(*walls: float, **changed: Any) -> list[TrainBlock]:
    """Blocks of PCcheck's two sides: 100 s without checkpoints, and the given times with
    checkpoints."""
    ours = study("pccheck").claims[0].ours
    pairs = [
        (block(Side(), number, 100.0), block(ours, number, wall_s, **changed))
        for number, wall_s in enumerate(walls)
    ]
    return [one for pair in pairs for one in pair]


@pytest.mark.parametrize(
    ("walls", "answer"),
    [
        ((99.0, 100.5, 100.5, 100.5, 100.9), Answer.YES),
        ((99.0, 100.5, 100.5, 100.5, 101.1), Answer.UNDECIDED),
        ((99.0, 100.5, 100.5, 100.5, 104.0), Answer.UNDECIDED),
        ((99.0, 100.5, 100.5, 100.9), Answer.UNDECIDED),
        ((104.9, 106.0, 106.0, 106.0, 107.0), Answer.UNDECIDED),
        ((105.1, 106.0, 106.0, 106.0, 107.0), Answer.NO),
        ((100.5,), Answer.UNDECIDED),
    ],
)
def test_an_overhead_holds_if_its_whole_interval_is_lower_by_the_noise_floor(
    example: ResultFile, walls: tuple[float, ...], answer: Answer
) -> None:
    """The claim is 103 s. So 101 s and 105 s are 2% away, which may be noise."""
    (found,) = judged(example, "pccheck", *overheads(*walls))
    assert found.ours == pytest.approx(median(walls) / 100 - 1)
    if found.ci95:
        assert (found.ci95.low, found.ci95.high) == pytest.approx(
            (min(walls) / 100 - 1, max(walls) / 100 - 1)
        )
    assert found.answer is answer
    pairs = "1 pair" if len(walls) == 1 else f"{len(walls)} pairs"
    if len(walls) < 5:
        assert found.reason == f"{pairs}, 5 needed"
    elif answer is Answer.UNDECIDED:
        within = min(walls) <= 103 <= max(walls)
        assert found.reason == (
            "the claim is within the interval"
            if within
            else "the interval ends within 2% of the claim, which may be noise"
        )
    assert found.setting == (
        "hybrid lazy=2 compared with none, rank 0, 1.00 GiB of 12.55 GiB, a save every 10 steps, "
        f"a step 1 s, {pairs}"
    )


def test_a_wall_clock_is_what_is_saved_of_it(example: ResultFile) -> None:
    """The measured figure, not the computed one: 86 to 70 s, compared with 100 s."""
    claim = study("hybrid-io").claims[2]
    blocks = [
        one
        for number, wall_s in enumerate((86.0, 80.0, 80.0, 80.0, 70.0))
        for one in (block(claim.ours, number, wall_s), block(claim.theirs, number, 100.0))
    ]
    (found,) = judged(example, "hybrid-io", *blocks)
    assert (found.claim, found.answer) == (claim, Answer.YES)
    assert found.ours == pytest.approx(0.2)
    assert found.ci95 is not None
    assert (found.ci95.low, found.ci95.high) == pytest.approx((0.14, 0.3))


def test_a_stall_is_compared_by_the_median_of_each_block(example: ResultFile) -> None:
    stock, ours, own = Side(writer="peer:torch-save", mode="sync"), "async=2", "sync"
    blocks = []
    for number, stall_s in enumerate((50.0, 60.0, 60.0, 60.0, 70.0)):
        blocks += [
            block(stock, number, 100.0, stall_s),
            block(Side(writer="hybrid", mode=own), number, 100.0, 10.0),
            block(Side(writer="hybrid", mode=ours), number, 100.0, 1.0),
            block(Side(writer="hybrid", mode="lazy=2"), number, 100.0, 0.5),
        ]
    found = judged(example, "async", *blocks)
    assert [one.ours for one in found] == pytest.approx([60.0, 120.0, 10.0])
    assert [one.answer for one in found] == [Answer.UNDECIDED, Answer.YES, Answer.NO]


@pytest.mark.parametrize(
    ("plan", "changed", "reason"),
    [
        ({"every_asked": "20", "every": 20}, {}, "checkpoints every 20, and the claim is about"),
        (
            {"simulated_s": 0.7},
            {},
            "a step took 1.05 s and not the 700 ms simulated",
        ),
        (
            {},
            {"saves": (TrainSave(step=1, status="dropped", stall_s=1.0, persist_s=None),)},
            "only 0 of 3 checkpoints became durable",
        ),
    ],
)
def test_another_setting_is_not_comparable(
    example: ResultFile, plan: dict[str, Any], changed: dict[str, Any], reason: str
) -> None:
    blocks = overheads(101.0, 102.0, 103.0, **changed)
    (found,) = judged(example, "pccheck", *blocks, plan=_PLAN | plan)
    assert found.answer is Answer.NOT_COMPARABLE
    assert reason in found.reason


@pytest.mark.parametrize("wrong", [{"losses_equal": False}, {"resumed_equal": False}])
def test_blocks_whose_losses_are_wrong_make_no_pair(
    example: ResultFile, wrong: dict[str, bool]
) -> None:
    with pytest.raises(ResultFileError, match="no repetition has a block of both hybrid lazy=2"):
        judged(example, "pccheck", *overheads(101.0, 102.0, **wrong))


def test_blocks_of_several_options_are_refused(example: ResultFile) -> None:
    """No option is chosen silently. The error says what to do."""
    ours = study("pccheck").claims[0].ours
    other = [
        block(ours, 0, 200.0, options={"iodepth": 4}),
        block(ours, 1, 200.0, options={"iodepth": 8}),
    ]
    with pytest.raises(ResultFileError, match="hybrid iodepth=4, hybrid iodepth=8") as caught:
        judged(example, "pccheck", block(Side(), 0, 100.0), block(Side(), 1, 100.0), *other)
    assert "hybrid lazy=2 in more than one setting" in str(caught.value)
    assert "iobench reproduce CLAIM --target DIR" in str(caught.value)


def test_two_trainings_of_one_workload_are_refused(example: ResultFile) -> None:
    """A record of its files is accepted in addition: it is another measurement."""
    about = study("pccheck")
    facts = replace(example.run.workload, name=about.workloads[0])
    run = replace(example.run, workload=facts)
    blocks = tuple(overheads(101.0, 102.0))
    training = replace(example, run=replace(run, plan=_PLAN), samples=(), training=blocks)
    files = replace(example, run=run)
    assert len(judge_records(about, [files, training])) == 1
    with pytest.raises(ResultFileError, match=f"2 records of training {facts.name}"):
        judge_records(about, [files, training, training])
