"""`iobench compare`: findings from recorded samples, refused comparisons, and exit codes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import app
from typer.testing import CliRunner

from iobench.environment.blockdev import BlockDevice
from iobench.environment.machine import Cpu
from iobench.errors import IobenchError, OptionError, RegressionError, UsageError
from iobench.report.compare import compare, compare_document
from iobench.report.facts import unlike
from iobench.report.render import render
from iobench.results import (
    AxisValues,
    Failure,
    Operation,
    ResultFile,
    ResultWriter,
    Sample,
    Setting,
    WorldFacts,
    read,
)
from iobench.stats.comparison import Finding, compare_runs

REFERENCE = read(Path(__file__).parents[1] / "results" / "recorded.jsonl")


def changed(change: Callable[[Sample], Sample], result: ResultFile = REFERENCE) -> ResultFile:
    """The recorded run with each sample changed."""
    return replace(result, samples=tuple(map(change, result.samples)))


def slowed(writer: str, operation: str, factor: float) -> ResultFile:
    """The recorded run, in which one writer takes `factor` times as long."""

    def slow(sample: Sample) -> Sample:
        chosen = (sample.writer, sample.operation) == (writer, operation)
        took = sample.elapsed_s * factor
        return replace(sample, elapsed_s=took, phases_s={}) if chosen else sample

    return changed(slow)


def failing(
    writer: str, operation: Operation, repetition: int, result: ResultFile = REFERENCE
) -> ResultFile:
    """The recorded run, in which an operation of one writer fails; it has no samples after that."""
    own = [s for s in result.samples if s.writer == writer]
    failure = Failure(
        run_id=result.run.run_id,
        repetition=repetition,
        order=0,
        setting=replace(own[0].setting, axes=AxisValues()),
        operation=operation,
        error="OSError: [Errno 28] No space left on device",
        started_at=own[0].started_at,
    )
    samples = tuple(s for s in result.samples if s not in own or s.repetition < repetition)
    return replace(result, samples=samples, failures=(*result.failures, failure))


def _threads(setting: Setting, threads: int) -> Setting:
    return replace(setting, options={**setting.options, "threads": threads})


def findings(old: ResultFile, new: ResultFile) -> dict[tuple[str, str], Finding | None]:
    rows = compare([old], [new], 0.05).rows
    return {(row.writer, row.operation): row.finding for row in rows}


def save_as(result: ResultFile, path: Path) -> Path:
    with ResultWriter(path) as file:
        for record in (result.run, *result.samples, *result.failures):
            file.write(record)
    return path


def run(*arguments: object) -> tuple[BaseException | None, str]:
    """Run `iobench compare`. Return its exception and its output."""
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    return result.exception, result.stdout


def test_the_saves_of_one_writer_that_sleeps_are_the_one_regression() -> None:
    comparison = compare([REFERENCE], [slowed("odirect", "save", 1.1)], 0.05)
    assert [(row.writer, row.operation) for row in comparison.regressions] == [("odirect", "save")]
    row = comparison.regressions[0]
    assert row.ratio == pytest.approx(1 / 1.1)
    assert row.ci95 is not None
    assert row.ci95[0] <= row.ratio <= row.ci95[1]
    others = [row.finding for row in comparison.rows if not row.regression]
    assert others == [Finding.NONE] * 5


def test_what_is_no_regression() -> None:
    """Faster, and worse by less than the threshold."""
    found = findings(REFERENCE, slowed("buffered", "restore", 0.8))
    assert found.pop(("buffered", "restore")) is Finding.BETTER
    assert set(found.values()) == {Finding.NONE}
    comparison = compare([REFERENCE], [slowed("odirect", "save", 1.1)], 0.2)
    assert comparison.regressions == []
    assert Finding.WORSE in {row.finding for row in comparison.rows}


@pytest.mark.parametrize(
    ("machine", "storage", "what"),
    [
        ({"kernel": "6.1.0"}, {}, "kernel: 6.18.44-fc-v669 before, 6.1.0 now"),
        ({"cpu": Cpu(model="Z80", usable_cpus=2)}, {}, "CPU: Intel"),
        ({}, {"fs_type": "xfs"}, "file system: ext4 before, xfs now"),
        (
            {},
            {"device": BlockDevice(type="nvme", size_bytes=2**40)},
            "device: virtio 256.00 GiB before",
        ),
    ],
)
def test_what_is_unlike_is_said(
    machine: dict[str, Any], storage: dict[str, Any], what: str
) -> None:
    before = REFERENCE.run
    environment = replace(
        before.environment,
        machine=replace(before.environment.machine, **machine),
        storage=replace(before.environment.storage, **storage),
    )
    differing = unlike(before, replace(before, environment=environment))
    assert len(differing) == 1
    assert differing[0].startswith(what)


def test_another_size_is_unlike_and_another_host_name_is_not() -> None:
    before = REFERENCE.run
    smaller = replace(before, workload=replace(before.workload, bytes=5 * 2**28))
    assert [line.split(":")[0] for line in unlike(before, smaller)] == ["size"]
    world = WorldFacts(
        launcher="torchrun",
        size=2,
        nodes=2,
        hosts=("a", "b"),
        node=(0, 1),
        interface=None,
        restored_from=(0, 1),
        clock_offset_s=(0.0, 0.0),
        clock_error_s=(0.0, 0.0),
    )
    assert unlike(before, replace(before, world=world)) == ["nodes: 1 before, 2 now"]
    machine = replace(before.environment.machine, hostname="other")
    renamed = replace(before, environment=replace(before.environment, machine=machine))
    assert unlike(before, renamed) == []


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ({"crc32": False}, "CRC32 of torch files: yes before, no now"),
        ({"pool_bytes": 2**24}, "repeating data: every 1.00 GiB before, every 16.00 MiB now"),
        ({"pool_bytes": 2**31}, "repeating data: every 1.00 GiB before, no now"),
        (
            {"writers": [{"name": "buffered"}, {"name": "peer:torch-save"}]},
            "restores into new memory, as with peers: no before, yes now",
        ),
        ({"round_s": 60.0}, "saves: in turn with restores before, for a time now"),
        ({"writers": [{"name": "odirect"}], "repeat": 9, "aa": True, "seed": 1}, None),
    ],
)
def test_runs_under_other_rules_are_unlike(plan: dict[str, object], what: str | None) -> None:
    before = REFERENCE.run
    after = replace(before, plan={**before.plan, **plan})
    assert unlike(before, after) == ([] if what is None else [what])


def test_other_settings_of_a_writer_are_compared_and_said() -> None:
    def tuned(sample: Sample) -> Sample:
        return replace(sample, setting=_threads(sample.setting, 64))

    row = compare([REFERENCE], [changed(tuned)], 0.05).rows[-1]
    assert row.writer == "odirect"
    assert "threads: 4 before, 64 now" in row.notes


def test_a_writer_in_one_run_only_is_named() -> None:
    fewer = replace(
        REFERENCE, samples=tuple(s for s in REFERENCE.samples if s.writer != "buffered")
    )
    comparison = compare([REFERENCE], [fewer], 0.05)
    assert comparison.missing == ("buffered save", "buffered restore")
    assert len(comparison.rows) == 4


def test_invalid_figures_are_not_judged() -> None:
    """The same for saves whose only verification is an invalid restore."""

    def warm(sample: Sample) -> Sample:
        return replace(sample, cold=None) if sample.writer == "odirect" else sample

    rows = compare([REFERENCE], [changed(warm)], 0.05).rows
    save, restore = (row for row in rows if row.finding is None)
    assert (save.writer, save.operation, save.spoilt) == ("odirect", "save", True)
    assert save.notes[0].startswith("INVALID now: not verified: no valid restore")
    assert (restore.writer, restore.operation, restore.spoilt) == ("odirect", "restore", True)
    assert restore.notes[0].startswith("INVALID now: not proved cold")


def test_what_failed_now_is_not_judged() -> None:
    """A writer whose last restore failed has rows, but no findings: docs/results.md."""
    rows = compare([REFERENCE], [failing("buffered", "restore", 4)], 0.05).rows
    spoilt = [row for row in rows if row.finding is None]
    assert [(row.writer, row.operation) for row in spoilt] == [
        ("buffered", "save"),
        ("buffered", "restore"),
    ]
    assert all(row.spoilt and not row.regression for row in spoilt)
    why = "FAILED now: its restore failed in repetition 5 (OSError: [Errno 28] No space left"
    assert all(row.notes[0].startswith(why) for row in spoilt)


def test_what_failed_before_is_not_judged_and_not_spoilt_now() -> None:
    comparison = compare([failing("buffered", "restore", 4)], [REFERENCE], 0.05)
    (row, _) = [row for row in comparison.rows if row.finding is None]
    assert row.notes[0].startswith("FAILED before: its restore failed in repetition 5")
    assert comparison.spoilt == []


@pytest.mark.parametrize("tuned", [False, True], ids=["as before", "other settings"])
def test_a_failure_before_the_first_sample_is_not_missing(tuned: bool) -> None:
    new = failing("odirect", "save", 0)
    if tuned:
        failure = replace(new.failures[0], setting=_threads(new.failures[0].setting, 64))
        new = replace(new, failures=(failure,))
    comparison = compare([REFERENCE], [new], 0.05)
    assert (comparison.missing, comparison.added) == ((), ())
    why = "its save failed in repetition 1 (OSError: [Errno 28] No space left on device)"
    assert comparison.failed == {"odirect save": why, "odirect restore": why}
    assert comparison.spoilt == ["odirect save", "odirect restore"]


def test_other_numbers_of_processes_are_not_paired() -> None:
    """A writer with 1 process before and 4 now was not measured on both sides."""
    now = changed(
        lambda one: (
            replace(one, setting=replace(one.setting, axes=replace(one.axes, numjobs=4)))
            if one.writer == "odirect"
            else one
        )
    )
    comparison = compare([REFERENCE], [now], 0.05)
    assert not [row for row in comparison.rows if row.writer == "odirect"]
    assert any("odirect" in name for name in comparison.missing)
    assert any("odirect" in name for name in comparison.added)


def test_a_failure_at_once_in_one_of_several_runs() -> None:
    """Its samples of the other run do not hide it."""
    broken = failing("odirect", "save", 0)
    comparison = compare([REFERENCE, REFERENCE], [REFERENCE, broken], 0.05)
    rows = [row for row in comparison.rows if row.writer == "odirect"]
    assert rows
    assert all(row.spoilt and row.finding is None for row in rows)
    assert comparison.spoilt


def test_what_one_of_several_runs_a_side_has() -> None:
    """Nothing shows how much runs differ, so the figures are not judged."""

    def without(result: ResultFile) -> ResultFile:
        return replace(
            result, samples=tuple(one for one in result.samples if one.writer != "odirect")
        )

    slow = slowed("odirect", "save", 2)
    comparison = compare([REFERENCE, without(REFERENCE)], [slow, without(slow)], 0.05)
    (row,) = (row for row in comparison.rows if (row.writer, row.operation) == ("odirect", "save"))
    assert row.ratio == pytest.approx(0.5)
    assert (row.finding, row.regression, row.spoilt) == (None, False, False)
    assert "the spread between runs is unknown" in " ".join(row.notes)


def test_few_samples_say_that_they_are_few(tmp_path: Path) -> None:
    """A note that all rows have is printed once."""
    few = replace(REFERENCE, samples=tuple(s for s in REFERENCE.samples if s.repetition < 3))
    row = compare([REFERENCE], [few], 0.05).rows[0]
    assert row.finding is Finding.NONE
    assert row.notes == ("3 repetitions cannot show a difference; --repeat 5",)
    _, printed = run(save_as(REFERENCE, tmp_path / "old"), save_as(few, tmp_path / "new"))
    assert printed.startswith("No difference shown: 6 of 6\n\nllama7b: no regression shown\n")
    assert printed.count("3 repetitions cannot show a difference; --repeat 5\n") == 1


def test_a_regression_is_exit_code_5(tmp_path: Path) -> None:
    old = save_as(REFERENCE, tmp_path / "old.jsonl")
    new = save_as(slowed("odirect", "save", 1.1), tmp_path / "new.jsonl")
    again = save_as(slowed("odirect", "save", 1.0), tmp_path / "again.jsonl")
    assert run(old, again)[0] is None
    copy = save_as(REFERENCE, tmp_path / "copy.jsonl")
    assert all(isinstance(run(old, same)[0], UsageError) for same in (old, copy))
    error, printed = run(old, new, "--strict")
    assert isinstance(error, RegressionError)
    assert error.exit_code == 5
    assert str(error) == "slower by more than 5%: odirect save"
    assert "worse (regression)" in printed
    assert run(old, new, "--threshold", "20%")[0] is None
    assert isinstance(run(old, new, "--threshold", "0.2")[0], OptionError)


def rerun(speed: float, result: ResultFile = REFERENCE, run_id: str = "") -> ResultFile:
    """The recorded run again: every rate is multiplied by `speed`, also fio's."""
    again = changed(lambda s: replace(s, elapsed_s=s.elapsed_s / speed), result)
    ceiling = tuple(replace(one, elapsed_s=one.elapsed_s / speed) for one in again.ceiling)
    run_id = run_id or f"{speed:.12f}".replace(".", "")[:16]
    again = changed(lambda s: replace(s, run_id=run_id), again)
    return replace(again, run=replace(again.run, run_id=run_id), ceiling=ceiling)


def test_the_spread_between_runs_is_the_floor() -> None:
    """Runs 8% apart show no difference of 8%; runs 1% apart do."""
    slower = slowed("odirect", "save", 1.08)
    wide, close = (0.96, 1.0, 1.04), (0.995, 1.0, 1.005)
    for speeds, found in ((wide, []), (close, [("odirect", "save")])):
        old, new = [rerun(one) for one in speeds], [rerun(one, slower) for one in speeds]
        comparison = compare(old, new, 0.05)
        assert [(row.writer, row.operation) for row in comparison.regressions] == found
        assert not comparison.one_run_a_side
    row = comparison.regressions[0]
    assert (row.ratio, row.floor) == (pytest.approx(1 / 1.08), pytest.approx(0.02))
    assert (row.old_samples, row.new_samples) == (15, 15)


def test_storage_that_became_slower_is_no_regression_where_fio_shows_it() -> None:
    old, new = [rerun(one) for one in (1.0, 1.01)], [rerun(one) for one in (0.8, 0.81)]
    slower = compare(old, new, 0.05)
    assert slower.controls == {
        "fio restore": pytest.approx(0.8, rel=0.01),
        "fio save": pytest.approx(0.8, rel=0.01),
    }
    assert all(row.floor >= 0.24 for row in slower.rows)
    assert slower.regressions == []
    unseen = [replace(one, ceiling=()) for one in new]
    assert len(compare(old, unseen, 0.05).regressions) == 6


@pytest.mark.parametrize(("version", "regressions"), [("2.0", 0), ("2.1", 1)])
def test_a_peer_is_a_control_unless_its_version_changed(version: str, regressions: int) -> None:
    def with_peer(result: ResultFile, torch: str) -> ResultFile:
        def peer(sample: Sample) -> Sample:
            if sample.writer != "buffered":
                return sample
            return replace(sample, setting=replace(sample.setting, writer="peer:torch-save"))

        machine = replace(result.run.environment.machine, versions={"torch": torch})
        environment = replace(result.run.environment, machine=machine)
        return changed(peer, replace(result, run=replace(result.run, environment=environment)))

    new = with_peer(slowed("buffered", "save", 1.2), version)
    comparison = compare([with_peer(REFERENCE, "2.0")], [new], 0.05)
    assert len(comparison.regressions) == regressions
    row = next(row for row in comparison.rows if row.writer == "peer:torch-save")
    assert row.control is (version == "2.0")


def test_one_run_a_side_warns_and_passes(tmp_path: Path) -> None:
    old = save_as(REFERENCE, tmp_path / "old.jsonl")
    new = save_as(slowed("odirect", "save", 1.1), tmp_path / "new.jsonl")
    result = CliRunner().invoke(app, ["compare", str(old), str(new)])
    assert result.exception is None
    assert "one run a side" in result.stdout
    assert "warning: slower by more than 5%: odirect save; one run a side" in result.stderr


def test_several_runs_a_side_on_the_command_line(tmp_path: Path) -> None:
    """Files before and after `--`, or directories of files; options may follow."""
    slower = slowed("odirect", "save", 1.1)
    for side, result in (("old", REFERENCE), ("new", slower)):
        (tmp_path / side).mkdir()
        for speed in (0.995, 1.0, 1.005):
            save_as(rerun(speed, result), tmp_path / side / f"{speed}.jsonl")
    old, new = (sorted((tmp_path / side).iterdir()) for side in ("old", "new"))
    for arguments in ((*old, "--", *new, "--format", "md"), (old[0].parent, new[0].parent)):
        error, printed = run(*arguments)
        assert isinstance(error, RegressionError)
        assert "beyond 2.0%" in printed


def test_unlike_runs_are_refused_unless_forced(tmp_path: Path) -> None:
    machine = replace(REFERENCE.run.environment.machine, kernel="7.0")
    environment = replace(REFERENCE.run.environment, machine=machine)
    other = replace(REFERENCE, run=replace(REFERENCE.run, environment=environment))
    old = save_as(REFERENCE, tmp_path / "old.jsonl")
    new = save_as(other, tmp_path / "new.jsonl")
    error, printed = run(old, new)
    assert isinstance(error, UsageError)
    assert "kernel: 6.18.44-fc-v669 before, 7.0 now" in str(error)
    assert printed == ""
    error, printed = run(old, new, "--force")
    assert error is None
    assert "unlike runs, compared by force: kernel" in printed


@pytest.mark.parametrize("repetition", [0, 4])
def test_a_writer_that_broke_is_exit_code_1(tmp_path: Path, repetition: int) -> None:
    """Or whose figures became INVALID."""
    old = save_as(REFERENCE, tmp_path / "old.jsonl")
    warm = save_as(changed(lambda s: replace(s, cold=None)), tmp_path / "warm.jsonl")
    error, _ = run(old, warm)
    assert type(error) is IobenchError
    assert "INVALID now" in str(error)
    new = save_as(failing("odirect", "save", repetition), tmp_path / "new.jsonl")
    error, printed = run(old, new)
    assert type(error) is IobenchError
    assert error.exit_code == 1
    assert "FAILED: odirect save, odirect restore" in str(error)
    assert "FAILED now: " in printed
    _, printed = run(old, new, "--format", "md")
    assert printed.startswith("**llama7b: no regression shown, 2 INVALID or FAILED now**")


def test_a_run_in_which_all_failed_is_no_run_of_other_writers(tmp_path: Path) -> None:
    old = save_as(REFERENCE, tmp_path / "old.jsonl")
    broken = REFERENCE
    for writer in ("buffered", "uncached", "odirect"):
        broken = failing(writer, "save", 0, broken)
    error, printed = run(old, save_as(broken, tmp_path / "new.jsonl"))
    assert type(error) is IobenchError
    assert printed.count("FAILED now: ") == 6


def test_nothing_in_common_is_refused(tmp_path: Path) -> None:
    old = save_as(REFERENCE, tmp_path / "old.jsonl")
    new = save_as(
        changed(lambda s: replace(s, setting=replace(s.setting, writer="other"))),
        tmp_path / "new.jsonl",
    )
    error, _ = run(old, new)
    assert isinstance(error, UsageError)
    assert "no writer in common" in str(error)


def test_the_rows_of_a_comparison_share_its_error() -> None:
    """The intervals of six rows are at 1 - 5% / 6 each, those of one writer at 1 - 5% / 2."""
    speeds = (0.98, 1.0, 1.03), (0.99, 1.0, 1.01)

    def rates(result: ResultFile) -> list[float]:
        saves = [s for s in result.samples if (s.writer, s.operation) == ("odirect", "save")]
        return [one.bytes / one.elapsed_s for one in saves]

    for names, count in ((("buffered", "uncached", "odirect"), 6), (("odirect",), 2)):
        chosen = tuple(s for s in REFERENCE.samples if s.writer in names)
        few = replace(REFERENCE, samples=chosen)
        old, new = ([rerun(one, few) for one in side] for side in speeds)
        comparison = compare(old, new, 0.05)
        assert len(comparison.rows) == count
        row = next(
            one for one in comparison.rows if one.operation == "save" and one.writer == "odirect"
        )
        expected = compare_runs([*map(rates, new)], [*map(rates, old)], rows=count).ratio.interval
        assert row.ci95 == expected
    stream = io.StringIO()
    render(compare_document(comparison), "table", stream)
    assert " 95% interval " in stream.getvalue()
    assert "the intervals of all rows hold together in 95% of comparisons" in stream.getvalue()


def test_markdown_and_json() -> None:
    """Markdown for a pull request; JSON is unrounded and plain."""
    slower = compare_document(compare([REFERENCE], [slowed("odirect", "save", 1.1)], 0.05))
    markdown, plain = io.StringIO(), io.StringIO()
    render(slower, "md", markdown)
    lines = markdown.getvalue().splitlines()
    assert lines[0] == "**llama7b: 1 regression**  "
    assert any(line.startswith("| writer | operation | before GiB/s |") for line in lines)
    assert any(line.startswith("| odirect | save | 1.28 | 1.16 | 0.909 |") for line in lines)
    render(slower, "json", plain)
    document = json.loads(plain.getvalue())
    assert document["schema"] == "iobench.compare/3"
    row = next(row for row in document["rows"] if row["regression"])
    assert row["ratio"] == pytest.approx(1 / 1.1, rel=1e-12)
    assert row["finding"] == "worse"
    low, high = row["ci95"]
    assert low <= row["ratio"] <= high
