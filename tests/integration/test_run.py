"""`iobench run` as a user calls it, on a real file system, with a real fio if installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from iobench import results
from iobench.environment import fio_version, probe_directory
from iobench.results import read
from iobench.results.setting import AXES_IF_SET, AXIS_NAMES

Command = Callable[..., "subprocess.CompletedProcess[str]"]

WRITERS = "buffered,uncached,odirect,null"
SUMMARY_KEYS = {
    *(
        "label",
        "writer",
        "options",
        *(set(AXIS_NAMES) - set(AXES_IF_SET)),
        "operation",
        "samples",
        "repetitions",
        "bytes",
        "median_bytes_per_s",
    ),
    *(
        "ci95_bytes_per_s",
        "of_ceiling",
        "ratio",
        "ratio_ci95",
        "cpu_s_per_gib",
        "memory",
        "first_done_s",
        "last_done_s",
    ),
    *("phases_s", "paths", "fallbacks", "decisions", "latencies", "verdict", "reasons"),
}
CEILING_KEYS = {"save_bytes_per_s", "restore_bytes_per_s", "save_job", "restore_job", "reason"}
WORKLOAD_KEYS = {
    "name",
    "rank",
    "bytes",
    "full_bytes",
    "restored_bytes",
    "files",
    "scaled",
    "scale",
}

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
def test_every_writer_and_fio(
    iobench: Command, direct: None, tiny_path: Path, target: Path, tmp_path: Path
) -> None:
    """One JSON document of the documented form, valid figures, and a record that loads. It runs in
    a process of its own, like for a user; the other tests of this file run in this process."""
    done = iobench(
        *("run", tiny_path, "--target", target, "--repeat", "2"),
        *("--writer", WRITERS, "--size", "4MiB", "--format", "json", "-o", tmp_path / "run.jsonl"),
    )
    assert os.listdir(target) == []
    document = document_of(done)

    assert set(document) == {
        *("schema", "environment", "workload", "ceiling"),
        *("baseline", "summaries", "winners", "failures", "record", "target", "stopped"),
    }
    assert document["schema"] == "iobench.report/1"
    assert set(document["environment"]) == {"machine", "storage"}
    workload = document["workload"]
    assert set(workload) == WORKLOAD_KEYS
    assert (workload["name"], workload["rank"], workload["scaled"]) == ("tiny", 0, True)
    assert 0 < workload["bytes"] <= 4 * 2**20 < workload["full_bytes"]
    ceiling = document["ceiling"]
    assert set(ceiling) == CEILING_KEYS
    assert ceiling["reason"] is None
    assert min(ceiling["save_bytes_per_s"], ceiling["restore_bytes_per_s"]) > 0
    assert {ceiling["save_job"]["ioengine"], ceiling["restore_job"]["ioengine"]} <= {
        "io_uring",
        "libaio",
        "psync",
    }

    summaries = by_label(document)
    storing = ("buffered", "uncached", "odirect")
    assert set(summaries) == {
        ("null", "save"),
        *((writer, operation) for writer in storing for operation in ("save", "restore")),
    }
    for (writer, operation), summary in summaries.items():
        assert set(summary) == SUMMARY_KEYS - ({"latencies"} if writer == "null" else set())
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
    assert record.end is not None
    assert (record.end.status, record.end.samples) == ("complete", 14)
    assert record.incomplete is None


def test_show_gives_the_same_table(run: Command, iobench_inside: Command, tmp_path: Path) -> None:
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


def test_without_fio(run: Command) -> None:
    """`--no-fio` runs no fio, and the report says so."""
    arguments = ("--writer", "buffered", "--no-fio", "--repeat", "1", "--format", "json")
    document = document_of(run("--size", "full", *arguments))
    assert document["ceiling"] == {**dict.fromkeys(CEILING_KEYS), "reason": "no fio job ran"}
    assert {summary["of_ceiling"] for summary in document["summaries"]} == {None}


def test_fio_is_missing(run: Command, fio_unknown: None, tmp_path: Path) -> None:
    """Without fio on PATH the run goes on without a ceiling, and the remedy is on stderr."""
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = ("--writer", "buffered", "--size", "full", "--repeat", "1", "-v")
    done = run(*arguments, PATH=str(empty))
    assert done.returncode == 0, done.stderr
    assert "fio: not measured" in done.stdout
    assert "fio is not installed: apt-get install fio" in done.stderr


def test_stdout_and_stderr(run: Command) -> None:
    """Plan and progress are plain lines on stderr; stdout has the report without escape codes."""
    done = run("--writer", "null", "--size", "full", "--no-fio")
    words = [line.split()[0] for line in done.stderr.splitlines()]
    assert words == [
        "workload",
        "files",
        "writers",
        "target",
        "run",
        "1",
        "2",
        "record:",
    ]
    assert done.stdout.startswith("Save: no valid figure: null is INVALID\n\ntiny, rank 0: ")
    assert "\x1b" not in done.stdout + done.stderr


def test_a_file_system_that_is_named_by_default(
    iobench_inside: Command, tiny_path: Path, target: Path
) -> None:
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
def test_every_kind_of_layout(
    run: Command, tiny_path: Path, tmp_path: Path, layout: str, direct: None
) -> None:
    """Sharded, nested and DCP files of other layouts are saved, restored and verified too."""
    text = tiny_path.read_text()
    path = tmp_path / "other.yaml"
    path.write_text(f"{text[: text.index('layout:')]}layout: {layout}\n")
    arguments = ("--repeat", "1", "--size", "full", "--no-fio", "--format", "json")
    document = document_of(run("-w", str(path), "--writer", "odirect", *arguments))
    assert {summary["verdict"] for summary in document["summaries"]} == {"VALID"}
    for sample in read(tmp_path / "run.jsonl").samples[1:]:
        assert sample.verified is not None
        assert sample.verified.tensors > 8


@needs_fio
def test_a_dry_run(run: Command, iobench_inside: Command, tiny_path: Path, tmp_path: Path) -> None:
    """Plan, bytes and time are printed; no record and no results directory are made."""
    done = run("--writer", "null,buffered", "--size", "full", "--dry-run")
    assert (done.returncode, done.stdout) == (0, "")
    words = [line.split()[0] for line in done.stderr.splitlines()]
    assert words == ["workload", "files", "writers", "target", "run", "expected"]
    assert not (tmp_path / "run.jsonl").exists()
    again = iobench_inside("run", tiny_path, "--writer", "null", "--dry-run", "--no-fio")
    assert again.returncode == 0
    assert os.listdir(tmp_path / "here") == []


def test_restored_bytes_that_differ(
    iobench: Command, tiny_path: Path, target: Path, tmp_path: Path
) -> None:
    """A third party's writer with wrong reads is INVALID in the table, and the exit code is 4."""
    package = tmp_path / "site"
    (package / "wrong-1.dist-info").mkdir(parents=True)
    (package / "wrong-1.dist-info/METADATA").write_text("Name: wrong\nVersion: 1\n")
    (package / "wrong-1.dist-info/entry_points.txt").write_text(
        "[iobench.writers]\nwrong = wrong:WrongWriter\n"
    )
    (package / "wrong.py").write_text(_WRONG)
    done = iobench(
        *("run", "-w", tiny_path, "--target", target, "--no-fio", "--repeat", "1"),
        *("--writer", "wrong", "--size", "full", "-o", tmp_path / "run.jsonl"),
        PYTHONPATH=str(package),
    )
    assert done.returncode == 4, done.stderr
    assert len(re.findall("FAILED$", done.stdout, re.MULTILINE)) == 4  # two answers and two rows
    assert "wrong bytes: tensors differ from what was saved" in done.stdout
    assert done.stderr.splitlines()[-1].startswith(
        "iobench run: 8 tensors that were restored differ"
    )
    assert os.listdir(target) == []


_WRONG = """
from iobench.writers.buffered import BufferedWriter

class WrongWriter(BufferedWriter):
    name = "wrong"
    summary = "turns a byte of every file over"

    def read_ranges(self, image, target, ranges):
        done = super().read_ranges(image, target, ranges)
        longest = max(image.segments, key=lambda segment: segment.length)
        longest.memory[0] ^= 1
        return done
"""
