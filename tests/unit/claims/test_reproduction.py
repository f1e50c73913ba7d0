"""Findings computed by hand: yes, no, undecided and not comparable, from valid pairs only; of files
and of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from iobench.claims.claims import CLAIMS, Answer, Claim, ClaimFinding, ClaimMeasure, study
from iobench.claims.reproduction import judge_records
from iobench.errors import ResultFileError
from iobench.results import AxisValues, Failure, ResultFile, TrainBlock, TrainSave, Verified
from iobench.stats.estimates import median


@pytest.fixture
def record(example: ResultFile) -> ResultFile:
    """The example with `odirect` renamed to `hybrid`, twice: six repetitions. Its saves are 2,
    3.125 and 1.28 times as fast as those of `buffered`."""
    again = [replace(one, repetition=one.repetition + 3) for one in example.samples]
    samples = [
        replace(one, setting=replace(one.setting, writer="hybrid"))
        if one.writer == "odirect"
        else one
        for one in (*example.samples, *again)
    ]
    return replace(example, samples=tuple(samples))


def claim(measure: ClaimMeasure, value: float) -> Claim:
    return Claim(
        text="x",
        workload="llama7b",
        measure=measure,
        value=value,
        ours="hybrid sync",
        theirs="buffered sync",
    )


def judged(record: ResultFile, measure: ClaimMeasure, value: float) -> ClaimFinding:
    about = replace(CLAIMS["hybrid-io"], claims=(claim(measure, value),))
    return judge_records(about, [record])[0]


@pytest.mark.parametrize(
    ("value", "answer"),
    [(1.2, Answer.YES), (1.7, Answer.UNDECIDED), (3.0, Answer.UNDECIDED), (3.2, Answer.NO)],
)
def test_a_ratio_holds_if_its_whole_interval_does(
    record: ResultFile, value: float, answer: Answer
) -> None:
    """The median of the pairs is 2, and the interval 1.28 to 3.125."""
    found = judged(record, "save", value)
    assert found.ours == pytest.approx(2)
    assert found.ci95 is not None
    assert (found.ci95.low, found.ci95.high) == pytest.approx((1.28, 3.125))
    assert found.answer is answer
    assert "hybrid over buffered, rank 0, 1.00 GiB of 12.55 GiB, 6 pairs" in found.setting


def test_invalid_samples_make_no_pair(record: ResultFile) -> None:
    """Without a valid restore nothing is compared."""
    samples = tuple(
        replace(s, bytes=s.bytes - 1) if (s.writer, s.operation) == ("hybrid", "restore") else s
        for s in record.samples
    )
    with pytest.raises(ResultFileError, match="no repetition has a valid restore of both hybrid"):
        judged(replace(record, samples=samples), "restore", 1.6)


@pytest.mark.parametrize("operation", ["save", "restore"])
def test_a_writer_with_wrong_bytes_is_not_judged(record: ResultFile, operation: str) -> None:
    """One wrong tensor of one restore is enough."""
    wrong, last = Verified(tensors=20, bytes=1, mismatches=1), record.samples[-1].repetition
    samples = tuple(
        replace(s, verified=wrong)
        if (s.writer, s.operation, s.repetition) == ("hybrid", "restore", last)
        else s
        for s in record.samples
    )
    with pytest.raises(ResultFileError, match=r"hybrid has failed \(wrong bytes"):
        judged(replace(record, samples=samples), operation, 1.6)


def test_a_writer_that_failed_is_not_judged(record: ResultFile) -> None:
    """Its samples before the failure do not count."""
    own = next(s for s in record.samples if s.writer == "hybrid")
    failure = Failure(
        run_id=own.run_id,
        repetition=9,
        order=0,
        setting=own.setting,
        operation="save",
        error="OSError: gone",
        started_at=own.started_at,
    )
    with pytest.raises(
        ResultFileError, match=r"hybrid has failed \(its save failed in repetition 10"
    ):
        judged(replace(record, failures=(failure,)), "save", 1.6)


@pytest.mark.parametrize(
    ("operation", "changed", "named"),
    [
        ("save", {"axes": AxisValues(format="torch", numjobs=4)}, "numjobs=1, hybrid numjobs=4"),
        ("save", {"options": {"iodepth": 9}}, "hybrid iodepth=9"),
        (
            "restore",
            {"axes": AxisValues(format="torch", restore_as="subset=0.1")},
            "hybrid restore-as=subset=0.1",
        ),
    ],
)
def test_a_record_of_several_settings_is_refused(
    record: ResultFile, operation: ClaimMeasure, changed: dict[str, Any], named: str
) -> None:
    """No setting is chosen silently, valid or not. The error says what to do."""
    more = tuple(
        replace(one, setting=replace(one.setting, **changed))
        for one in record.samples
        if (one.writer, one.operation, one.repetition) == ("hybrid", operation, 1)
    )
    both = replace(record, samples=(*record.samples, *more))
    with pytest.raises(ResultFileError, match="in more than one setting") as caught:
        judged(both, operation, 1.7)
    assert named in str(caught.value)
    assert "iobench reproduce CLAIM --target DIR" in str(caught.value)


def test_claims_without_a_record_are_left_out(record: ResultFile) -> None:
    """The record has the two claims of hybrid-io on the files of llama7b. A record of another
    workload alone is refused; no claim uses several, so they do not conflict."""
    found = judge_records(study("hybrid-io"), [record])
    assert [one.claim.workload for one in found] == ["llama7b"] * 2
    facts = replace(record.run.workload, name="gpt2-xl")
    other = replace(record, run=replace(record.run, workload=facts))
    with pytest.raises(ResultFileError, match="none of the records is of llama7b or gpt5b-nemo"):
        judge_records(study("hybrid-io"), [other])
    assert len(judge_records(study("hybrid-io"), [other, other, record])) == 2


_PLAN = {"verb": "train", "every": 10, "every_asked": "10", "simulated_s": 1.0, "steps": 30}


def block(
    side: str, repetition: int, wall_s: float, stall_s: float = 1.0, **changed: Any
) -> TrainBlock:
    writer, _, how = side.rpartition(" ")
    mode, _, slots = how.partition("=")
    saves = (TrainSave(step=1, status="committed", stall_s=stall_s, persist_s=1.0),)
    values: dict[str, Any] = {
        "run_id": "r",
        "repetition": repetition,
        "order": 0,
        "writer": writer,
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


def judged_training(
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
        (block("none", number, 100.0), block(ours, number, wall_s, **changed))
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
    (found,) = judged_training(example, "pccheck", *overheads(*walls))
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
    (found,) = judged_training(example, "hybrid-io", *blocks)
    assert (found.claim, found.answer) == (claim, Answer.YES)
    assert found.ours == pytest.approx(0.2)
    assert found.ci95 is not None
    assert (found.ci95.low, found.ci95.high) == pytest.approx((0.14, 0.3))


def test_a_stall_is_compared_by_the_median_of_each_block(example: ResultFile) -> None:
    blocks = []
    for number, stall_s in enumerate((50.0, 60.0, 60.0, 60.0, 70.0)):
        blocks += [
            block("peer:torch-save sync", number, 100.0, stall_s),
            block("hybrid sync", number, 100.0, 10.0),
            block("hybrid async=2", number, 100.0, 1.0),
            block("hybrid lazy=2", number, 100.0, 0.5),
        ]
    found = judged_training(example, "async", *blocks)
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
    (found,) = judged_training(example, "pccheck", *blocks, plan=_PLAN | plan)
    assert found.answer is Answer.NOT_COMPARABLE
    assert reason in found.reason


@pytest.mark.parametrize("wrong", [{"losses_equal": False}, {"resumed_equal": False}])
def test_blocks_whose_losses_are_wrong_make_no_pair(
    example: ResultFile, wrong: dict[str, bool]
) -> None:
    with pytest.raises(ResultFileError, match="no repetition has a block of both hybrid lazy=2"):
        judged_training(example, "pccheck", *overheads(101.0, 102.0, **wrong))


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


def test_a_side_with_a_budget_is_not_that_of_the_claim(example: ResultFile) -> None:
    """A budget adds to the stall: its blocks are those of another arm."""
    blocks = overheads(*[100.5] * 5)
    others = overheads(*[150.0] * 5, budget_bytes=2**29)
    (found,) = judged_training(example, "pccheck", *blocks, *others)
    assert found.ours == pytest.approx(0.005)
    assert found.answer is Answer.YES
