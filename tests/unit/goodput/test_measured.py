"""Times from result files: scaled by rate, from valid samples only, with resampled intervals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iobench.bench.judging.verdict import Verdict, VerdictStatus
from iobench.errors import OptionError, ResultFileError
from iobench.goodput import measured
from iobench.goodput.measured import by_hand, from_results
from iobench.results import AxisValues, Failure, ResultFile, Sample, VariantFacts, Verified, read


def test_times_are_medians_scaled_by_rate(example: ResultFile) -> None:
    """1 GiB was measured, so 3 GiB take three times the median. The fastest save is first."""
    found, notes = from_results(example, size_bytes=3 * 2**30)
    assert [one.name for one in found] == ["odirect", "buffered"]
    assert [one.costs.blocking_s for one in found] == pytest.approx([3 * 0.5, 3 * 1.0])
    assert [one.costs.restore_s for one in found] == pytest.approx([3 * 0.4, 3 * 0.8])
    assert [(one.mode, one.save_samples, one.restore_samples) for one in found] == [
        ("sync", 3, 3),
        ("sync", 3, 3),
    ]
    assert "times are those of 1.00 GiB, scaled to 3.00 GiB by the measured rate" in notes


def test_sizes(example: ResultFile) -> None:
    """The workload at full size is the default; what was measured whole is not called scaled, and a
    size of nothing is not the full size."""
    found, notes = from_results(example)
    full = example.run.workload.full_bytes / example.run.workload.bytes
    assert found[0].costs.blocking_s == pytest.approx(0.5 * full)
    assert "scaled to 12.55 GiB" in notes[0]
    found, notes = from_results(example, size_bytes=example.run.workload.bytes)
    assert found[0].costs.blocking_s == 0.5
    assert not [note for note in notes if "scaled" in note]
    with pytest.raises(OptionError, match="a checkpoint must take time"):
        from_results(example, size_bytes=0)


def test_blocking_time_adds_asynchronous_candidates(example: ResultFile) -> None:
    """Their persist time is the save time. They follow the other candidates."""
    found, _ = from_results(example, size_bytes=2**30, blocking_s=0.1)
    assert [(one.name, one.mode) for one in found] == [
        ("odirect", "sync"),
        ("buffered", "sync"),
        ("odirect", "async"),
        ("buffered", "async"),
    ]
    costs = found[2].costs
    assert (costs.blocking_s, costs.persist_s, costs.restore_s) == (0.1, 0.5, 0.4)


def test_resampled_medians_stay_among_the_samples(example: ResultFile) -> None:
    """They reach the whole range, as 3 samples bound a median no better. They are repeatable. One
    sample says nothing about the spread."""
    found, _ = from_results(example, size_bytes=2**30)
    drawn = found[0].resampled
    saves, restores = ([getattr(c, n) for c in drawn] for n in ("blocking_s", "restore_s"))
    assert (min(saves), max(saves)) == (0.4, 0.625)
    assert (min(restores), max(restores)) == (0.32, 0.5)
    assert sum(one == 0.4 for one in saves) == pytest.approx(len(saves) / 8, rel=0.3)  # (1/2)^3
    assert drawn == from_results(example, size_bytes=2**30)[0][0].resampled
    first = tuple(one for one in example.samples if one.repetition == 1)
    found, _ = from_results(replace(example, samples=first))
    assert [one.resampled for one in found] == [(), ()]


def _changed(example: ResultFile, operation: str, **values: Any) -> ResultFile:
    """The run, in which one sample of odirect has other values."""
    samples = [
        replace(one, **values)
        if (one.writer, one.operation, one.repetition) == ("odirect", operation, 2)
        else one
        for one in example.samples
    ]
    return replace(example, samples=tuple(samples))


def test_invalid_samples_are_left_out(example: ResultFile) -> None:
    """A save of another size does not count; the restore of its repetition does."""
    found, notes = from_results(_changed(example, "save", bytes=2**29), size_bytes=2**30)
    odirect = next(one for one in found if one.name == "odirect")
    assert (odirect.save_samples, odirect.restore_samples) == (2, 3)
    assert odirect.costs.blocking_s == pytest.approx((0.5 + 0.625) / 2)
    assert [note for note in notes if note.startswith("odirect: 1 invalid sample left out: moved")]


@pytest.fixture
def all_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of sizes and axes that the recorded run does not announce count too."""
    verdict = Verdict(status=VerdictStatus.VALID, reasons=())
    monkeypatch.setattr(
        measured, "judged", lambda result: [(one, verdict) for one in result.samples]
    )


def test_a_writer_that_does_not_count_is_not_planned_for(example: ResultFile) -> None:
    """One wrong tensor of one restore is enough: it has FAILED. Nor does one without restores."""
    wrong = Verified(tensors=20, bytes=1, mismatches=1)
    saves = tuple(
        one for one in example.samples if (one.writer, one.operation) != ("odirect", "restore")
    )
    for result, why in (
        (_changed(example, "restore", verified=wrong), "wrong bytes: tensors differ from what was"),
        (replace(example, samples=saves), "no save and restore of it counts"),
    ):
        found, notes = from_results(result)
        assert [one.name for one in found] == ["buffered"]
        assert any(f"odirect is not planned for: {why}" in note for note in notes)


@pytest.mark.usefixtures("all_valid")
def test_processes_that_restore_the_same_files(example: ResultFile) -> None:
    """Each of two processes restores all of it: a restore of the checkpoint takes that long."""
    axes = {"numjobs": 2, "slices": "all"}
    samples = tuple(
        replace(
            one,
            setting=replace(one.setting, axes=replace(one.axes, **axes)),
            bytes=one.bytes * (2 if one.operation == "restore" else 1),
        )
        for one in example.samples
    )
    found, _ = from_results(replace(example, samples=samples), size_bytes=2**30)
    assert [one.costs.restore_s for one in found] == pytest.approx([0.4, 0.8])


@pytest.mark.parametrize("samples_too", [True, False], ids=["after 3 samples", "at once"])
def test_a_writer_that_failed_is_not_planned_for(example: ResultFile, samples_too: bool) -> None:
    """Its earlier samples are not used."""
    own = [one for one in example.samples if one.writer == "odirect"]
    failure = Failure(
        run_id=example.run.run_id,
        repetition=4,
        order=0,
        setting=own[0].setting,
        operation="restore",
        error="OSError: gone",
        started_at=own[0].started_at,
    )
    samples = tuple(one for one in example.samples if samples_too or one not in own)
    result = replace(example, samples=samples, failures=(failure,))
    found, notes = from_results(result)
    assert [one.name for one in found] == ["buffered"]
    why = "its restore failed in repetition 5 (OSError: gone)"
    assert f"odirect is not planned for: {why}" in notes
    reason = r"it has no samples; odirect serializer=torch: its restore failed"
    with pytest.raises(ResultFileError, match=reason):
        from_results(replace(result, samples=()))


def test_different_measurements_are_not_pooled(example: ResultFile) -> None:
    """Each value of an axis is a candidate with its own name and samples."""
    samples = tuple(
        replace(one, setting=one.setting.at(granularity=value), elapsed_s=times * one.elapsed_s)
        for times, value in ((1, "blob"), (2, "layer"))
        for one in example.samples
    )
    found, _ = from_results(replace(example, samples=samples), size_bytes=2**30)
    assert {one.name: one.costs.blocking_s for one in found} == {
        "odirect granularity=blob": 0.5,
        "odirect granularity=layer": 1.0,
        "buffered granularity=blob": 1.0,
        "buffered granularity=layer": 2.0,
    }
    assert [(one.save_samples, one.restore_samples) for one in found] == [(3, 3)] * 4


def _of_some(one: Sample) -> Sample:
    return replace(
        one, setting=one.setting.at(restore_as="subset=0.1"), bytes=one.bytes // 10, elapsed_s=0.01
    )


@pytest.mark.usefixtures("all_valid")
def test_a_restore_of_some_tensors_is_not_that_of_a_job(example: ResultFile) -> None:
    """With full restores it is left out with a note. Alone it is not enough for a plan."""
    part = tuple(_of_some(one) for one in example.samples if one.operation == "restore")
    found, notes = from_results(
        replace(example, samples=(*example.samples, *part)), size_bytes=2**30
    )
    assert [(one.name, one.costs.restore_s) for one in found] == [
        ("odirect", 0.4),
        ("buffered", 0.8),
    ]
    assert [one.restore_samples for one in found] == [3, 3]
    assert "odirect: 3 restores of subset=0.1 left out: a job restores all tensors" in notes
    assert not [note for note in notes if "invalid" in note]
    saves = tuple(one for one in example.samples if one.operation == "save")
    with pytest.raises(ResultFileError, match=r"1 restore of subset=0.1 left out.*no restore of"):
        from_results(replace(example, samples=(*saves, part[0])))


@pytest.mark.usefixtures("all_valid")
def test_the_note_on_size_names_all_measured_sizes(example: ResultFile) -> None:
    """Four processes moved four times the bytes."""
    variants = tuple(
        VariantFacts(operation="save", axes=AxisValues(numjobs=n), bytes=n * 2**30, files=1)
        for n in (4, 1)
    )
    run = replace(example.run, variants=variants)
    samples = tuple(
        replace(one, setting=one.setting.at(numjobs=n), bytes=n * one.bytes)
        for n in (1, 4)
        for one in example.samples
    )
    _, notes = from_results(replace(example, run=run, samples=samples), size_bytes=2**30)
    assert "times are those of 1.00 GiB to 4.00 GiB, scaled to 1.00 GiB by the measured" in notes[0]


def test_nothing_to_plan_with_is_an_error_that_says_why(example: ResultFile) -> None:
    """A record of training is named as such, without notes on sizes: nothing was scaled."""
    saves = tuple(one for one in example.samples if one.operation == "save")
    training = Path(__file__).parents[3] / "results" / "reference-train-gpt5b-nemo.jsonl"
    for record, why in (
        (replace(example, samples=saves), ".*not verified.*iobench show"),
        (replace(example, samples=()), "it has no samples; see"),
        (read(training), "it is of iobench train, and plans .*; see"),
    ):
        with pytest.raises(ResultFileError, match=f"nothing to plan with: {why}"):
            from_results(record)


def test_times_by_hand() -> None:
    """A synchronous and an asynchronous save, whose persist time is the save time."""
    both = by_hand(save_s=30, blocking_s=2, restore_s=60)
    assert [(one.mode, one.costs.blocking_s, one.costs.persist_s) for one in both] == [
        ("sync", 30, 0),
        ("async", 2, 30),
    ]
    assert [one.mode for one in by_hand(save_s=3, restore_s=1)] == ["sync"]
