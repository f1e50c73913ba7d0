"""Findings computed by hand: yes, no, undecided and not comparable, from valid pairs only."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iobench.claims.claims import CLAIMS, Answer, Claim, ClaimFinding, ClaimMeasure, Side, study
from iobench.claims.reproduction import judge_records
from iobench.errors import ResultFileError, UnknownNameError
from iobench.results import AxisValues, Failure, ResultFile, Verified


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
    ours, theirs = Side(writer="hybrid", mode="sync"), Side(writer="buffered", mode="sync")
    return Claim(
        text="x", workload="llama7b", measure=measure, value=value, ours=ours, theirs=theirs
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


@pytest.mark.parametrize(("pairs", "said"), [(1, "1 pair"), (2, "2 pairs"), (4, "4 pairs")])
def test_fewer_than_five_pairs_decide_nothing(record: ResultFile, pairs: int, said: str) -> None:
    few = replace(record, samples=tuple(s for s in record.samples if s.repetition <= pairs))
    found = judged(few, "save", 1.2)
    assert (found.answer, found.reason) == (Answer.UNDECIDED, f"{said}, 5 needed")
    assert (found.ci95 is None, found.pairs) == (pairs == 1, pairs)


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


def test_two_records_of_one_workload_are_refused(record: ResultFile) -> None:
    """Neither is chosen silently; the error names both."""
    about = replace(CLAIMS["hybrid-io"], claims=(claim("save", 1.7),))
    records = [replace(record, path=Path(name)) for name in ("old.jsonl", "new.jsonl")]
    with pytest.raises(ResultFileError) as caught:
        judge_records(about, records)
    assert str(caught.value) == (
        "old.jsonl, new.jsonl: 2 records of llama7b; a claim is judged by one: give --results for "
        "one of them"
    )


def test_an_unknown_claim_is_named() -> None:
    with pytest.raises(UnknownNameError, match="unknown claim 'hybridio'; did you mean"):
        study("hybridio")
