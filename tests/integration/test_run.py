"""`iobench run` as a user calls it, on a real file system, with a real fio if installed."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.meddling import meddling

from iobench import results
from iobench.environment import fio_version, probe_directory
from iobench.results import read

Command = Callable[..., "subprocess.CompletedProcess[str]"]

WRITERS = "buffered,uncached,odirect,null"

needs_fio = pytest.mark.skipif(fio_version() is None, reason="fio is not installed")


@pytest.fixture
def direct(target: Path) -> None:
    """Skip if the file system of the tests has no direct I/O."""
    if not next(probe.ok for probe in probe_directory(target) if probe.name == "O_DIRECT"):
        pytest.skip("no direct I/O on the file system of the tests")


@pytest.fixture
def run(iobench_inside: Command, tiny_path: Path, target: Path, tmp_path: Path) -> Command:
    """Run `iobench run` on the tiny workload, twice; its record is run.jsonl, and no other file is
    left."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        done = iobench_inside(
            *("run", "--workload", tiny_path, "--target", target),
            *("--repeat", "2", "-o", tmp_path / "run.jsonl", *arguments),
            **environment,
        )
        assert os.listdir(target) == []
        return done

    return call


@pytest.fixture
def fio_unknown() -> Iterator[None]:
    """The version of fio is looked up again in this test, and in the next one that needs it."""
    fio_version.cache_clear()
    yield
    fio_version.cache_clear()


def document_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the one JSON document on stdout."""
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def by_label(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["writer"], one["operation"]): one for one in document["summaries"]}


@needs_fio
def test_every_writer_and_fio(iobench, direct, tiny_path, target, tmp_path) -> None:
    """One JSON document of the documented form, valid figures, and a record that loads. It runs in
    a process of its own, like for a user; the other tests of this file run in this process."""
    done = iobench(
        *("run", tiny_path, "--target", target, "--repeat", "2"),
        *("--writer", WRITERS, "--size", "4MiB", "--format", "json", "-o", tmp_path / "run.jsonl"),
    )
    assert os.listdir(target) == []
    document = document_of(done)

    assert document["schema"] == "iobench.report/1"  # test_summary has all of its keys
    assert set(document["environment"]) == {"machine", "storage"}
    workload = document["workload"]
    assert (workload["name"], workload["rank"], workload["scaled"]) == ("tiny", 0, True)
    assert 0 < workload["bytes"] <= 4 * 2**20 < workload["full_bytes"]
    ceiling = document["ceiling"]
    assert ceiling["reason"] is None
    assert min(ceiling["save_bytes_per_s"], ceiling["restore_bytes_per_s"]) > 0
    engines = {ceiling["save_job"]["ioengine"], ceiling["restore_job"]["ioengine"]}
    assert engines <= {"io_uring", "libaio", "psync"}

    summaries = by_label(document)
    storing = ("buffered", "uncached", "odirect")
    assert set(summaries) == {
        ("null", "save"),
        *((writer, operation) for writer in storing for operation in ("save", "restore")),
    }
    for (writer, operation), summary in summaries.items():
        assert (summary["samples"], summary["bytes"]) == (2, workload["bytes"])
        low, high = summary["ci95_bytes_per_s"]
        assert 0 < low <= summary["median_bytes_per_s"] <= high
        limit = ceiling[f"{operation}_bytes_per_s"]
        assert summary["of_ceiling"] == pytest.approx(summary["median_bytes_per_s"] / limit)
        assert summary["cpu_s_per_gib"] > 0
        assert summary["first_done_s"] == summary["last_done_s"] > 0
        assert sum(summary["paths"].values()) > 0
        expected = "INVALID" if writer == "null" else "VALID (scaled)"
        assert summary["verdict"] == expected, summary["reasons"]
        if writer != "null":
            assert f"scaled: {workload['scale']}" in summary["reasons"]
    assert set(summaries["odirect", "save"]["paths"]) >= {"direct"}
    assert set(summaries["buffered", "save"]["paths"]) == {"buffered"}
    assert {"write", "sync", "commit"} <= set(summaries["odirect", "save"]["phases_s"])
    assert "read" in summaries["odirect", "restore"]["phases_s"]

    assert len(results.load(tmp_path / "run.jsonl")) == 2 * 7
    record = read(tmp_path / "run.jsonl")
    assert len(record.ceiling) == 2 * 2 * 4
    assert (record.end.status, record.end.samples) == ("complete", 14)
    assert record.incomplete is None


def test_show_gives_the_same_table(run, iobench_inside, tmp_path) -> None:
    """`show` prints the same from the record as the run, in every format."""
    done = run("--writer", "buffered", "--size", "full", "--no-fio")
    assert done.returncode == 0, done.stderr
    assert "buffered  restore" in done.stdout
    shown = iobench_inside("show", tmp_path / "run.jsonl")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, done.stdout, "")
    for style in ("json", "csv", "md"):
        again = iobench_inside("show", tmp_path / "run.jsonl", "--format", style)
        assert (again.returncode, again.stderr) == (0, "")
        assert "buffered" in again.stdout


def test_fio_is_missing(run, fio_unknown, tmp_path) -> None:
    """Without fio on PATH the run goes on without a ceiling, and the remedy is on stderr."""
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = ("--writer", "buffered", "--size", "full", "--repeat", "1", "-v")
    done = run(*arguments, PATH=str(empty))
    assert done.returncode == 0, done.stderr
    assert "fio: not measured" in done.stdout
    assert "fio is not installed: apt-get install fio" in done.stderr


def test_stdout_and_stderr(run) -> None:
    """Plan and progress are plain lines on stderr; stdout has the report without escape codes."""
    done = run("--writer", "null", "--size", "full", "--no-fio")
    words = [line.split()[0] for line in done.stderr.splitlines()]
    assert words == ["workload", "files", "writers", "target", "run", "1", "2", "record:"]
    assert done.stdout.startswith("Save: no valid figure: null is INVALID\n\ntiny, rank 0: ")
    assert "\x1b" not in done.stdout + done.stderr


def test_a_file_system_that_is_named_by_default(iobench_inside, tiny_path, target) -> None:
    """Without --target and -o the current directory is measured, and the record is in results/."""
    done = iobench_inside(
        *("run", "-w", tiny_path, "--writer", "buffered", "--no-fio", "--repeat", "1"),
        *("--size", "full"),
        cwd=target,
    )
    assert done.returncode == 0, done.stderr
    (record,) = (target / "results").iterdir()
    assert done.stderr.endswith(f"record: results/{record.name}\n")
    assert os.listdir(target) == ["results"]
    assert read(record).incomplete is None


@pytest.mark.parametrize(
    "layout",
    [
        "{id: hf-export, max_shard_size: 1MB}",
        "{id: deepspeed-zero1, world_size: 2, precision: bf16}",
        "{id: deepspeed-zero3, world_size: 2, precision: bf16}",
        "{id: fsdp-dcp, world_size: 2}",
    ],
)
def test_every_kind_of_layout(run, tiny_path, tmp_path, layout, direct) -> None:
    """Sharded, nested and DCP files of other layouts are saved, restored and verified too."""
    text = tiny_path.read_text()
    path = tmp_path / "other.yaml"
    path.write_text(f"{text[: text.index('layout:')]}layout: {layout}\n")
    arguments = ("--repeat", "1", "--size", "full", "--no-fio", "--format", "json")
    document = document_of(run("-w", str(path), "--writer", "odirect", *arguments))
    assert {summary["verdict"] for summary in document["summaries"]} == {"VALID"}
    for sample in read(tmp_path / "run.jsonl").samples[1:]:
        assert sample.verified.tensors > 8


@needs_fio
def test_a_dry_run(run, iobench_inside, tiny_path, tmp_path) -> None:
    """Plan, bytes and time are printed; no record and no results directory are made."""
    done = run("--writer", "null,buffered", "--size", "full", "--dry-run")
    assert (done.returncode, done.stdout) == (0, "")
    words = [line.split()[0] for line in done.stderr.splitlines()]
    assert words == ["workload", "files", "writers", "target", "run", "expected"]
    assert not (tmp_path / "run.jsonl").exists()
    again = iobench_inside("run", tiny_path, "--writer", "null", "--dry-run", "--no-fio")
    assert again.returncode == 0
    assert os.listdir(tmp_path / "here") == []


def test_restored_bytes_that_differ(iobench, tiny_path, target, tmp_path) -> None:
    """A third party's writer with wrong reads is INVALID in the table, and the exit code is 4."""
    done = iobench(
        *("run", "-w", tiny_path, "--target", target, "--no-fio", "--repeat", "1"),
        *("--writer", "wrong", "--numjobs", "2", "--size", "full", "-o", tmp_path / "run.jsonl"),
        PYTHONPATH=meddling(tmp_path),
    )
    assert done.returncode == 4, done.stderr
    assert len(re.findall("FAILED$", done.stdout, re.MULTILINE)) == 4  # two answers and two rows
    assert "wrong bytes: tensors differ from what was saved" in done.stdout
    last = done.stderr.splitlines()[-1]
    assert re.match(r"iobench run: \d+ tensors that were restored differ", last)
    assert os.listdir(target) == []


@pytest.mark.parametrize("numjobs", ["1", "2"])
def test_all_saves_then_all_restores(iobench_inside, target, tmp_path, numjobs) -> None:
    """Ten checkpoints exist at once, and each restore finds the bytes of its own one."""
    done = iobench_inside(
        *("run", "--target", target, "--rules", "mlperf", "--size", "8MiB"),
        *("--numjobs", numjobs, "-o", tmp_path / "run.jsonl"),
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(target) == []
    record = read(tmp_path / "run.jsonl")
    assert record.run.workload.name == "mlperf-8b"
    assert [(one.operation, one.repetition) for one in record.samples] == [
        *(("save", number) for number in range(10)),
        *(("restore", number) for number in range(10)),
    ]
    restored = [one.verified for one in record.samples if one.verified]
    assert [one.mismatches for one in restored] == [0] * 10
    assert "10 saves, then 10 restores of these checkpoints; no claim of being" in done.stderr
    shown = json.loads(iobench_inside("show", tmp_path / "run.jsonl", "--format", "json").stdout)
    assert shown["rules"]["name"] == "mlperf"
    size, processes = shown["rules"]["not_kept"]
    assert size.endswith("of each process")
    assert processes == f"{numjobs} of 8 processes"
    assert f"not kept: {size}; {processes}; no claim of being an official result" in done.stdout
    for one in shown["summaries"]:
        assert one["verdict"] == "VALID (scaled)", one["reasons"]
        assert f"MLPerf Storage v3.0, checkpointing not kept: {processes}" in one["reasons"]


def test_saves_next_to_restores(iobench_inside, tiny_path, target, tmp_path) -> None:
    """Alone and next to another process, which restores all the time and finds the right bytes; a
    peer too. The answer has both rates, and nothing stays."""
    done = iobench_inside(
        *("run", "-w", tiny_path, "--target", target, "--writer", "odirect,peer:torch-save"),
        *("--background", "none,restore", "--repeat", "2", "--size", "full", "--no-fio"),
        *("-o", tmp_path / "run.jsonl"),
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(target) == []
    record = read(tmp_path / "run.jsonl")
    assert {one.bytes for one in record.samples} == {record.run.workload.bytes}
    readers = {"odirect": "odirect", "peer:torch-save": "buffered"}
    for one in record.samples:
        found = one.background_restores
        if one.axes.background is None:
            assert found is None
            continue
        assert (found.writer, found.error, found.mismatches) == (readers[one.writer], "", 0)
        assert found.lead_s > 0
        assert found.lag_s > 0
        assert found.bytes > 0
        assert 0 < found.reading_s <= one.elapsed_s + 1e-6
    shown = iobench_inside("show", tmp_path / "run.jsonl", "--format", "json")
    summaries = json.loads(shown.stdout)["summaries"]
    assert len(summaries) == 8
    for one in summaries:
        assert ("background_rates" in one) == ("background" in one)
        assert one["verdict"] in ("VALID", "NOT PROVED"), one["reasons"]
        if one["verdict"] == "VALID" and "background" in one:
            assert one["background_rates"]["kept"] == one["ratio"]
    if any(one["verdict"] == "VALID" and "background" in one for one in summaries):
        assert "while another process restores at" in done.stdout
    assert "times no background" in " ".join(done.stdout.split())
