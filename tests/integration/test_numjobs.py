"""`iobench run` with several processes and several values of its axes, as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from iobench.results import ResultFile, read

Command = Callable[..., "subprocess.CompletedProcess[str]"]

_MEDDLING = """
import os, time
from iobench.writers.buffered import BufferedWriter

class MeetingWriter(BufferedWriter):
    name = "meeting"
    summary = "goes on when the other process has begun as well"

    def write_many(self, images, target, **options):
        if "job-" in str(target):
            place, _, number = str(target).rpartition("/job-")
            open(f"{place}/met-{number}", "w").close()
            deadline = time.monotonic() + 60
            while not os.path.exists(f"{place}/met-{1 - int(number)}"):
                assert time.monotonic() < deadline, "no process came"
                time.sleep(0.01)
        return super().write_many(images, target, **options)

class FailingWriter(BufferedWriter):
    name = "failing"
    summary = "cannot, in the second process"

    def write_many(self, images, target, **options):
        if "step" in str(target) and str(target).endswith("job-1"):
            raise OSError(28, "No space left on device", str(target))
        return super().write_many(images, target, **options)

class WrongWriter(BufferedWriter):
    name = "wrong"
    summary = "turns a byte of every file over, in the second process"

    def read(self, image, target, **options):
        done = super().read(image, target, **options)
        if str(target).endswith("job-1"):
            max(image.segments, key=lambda segment: segment.length).memory[0] ^= 1
        return done
"""


def meddling(tmp_path: Path) -> str:
    """A directory with a package of three writers; for PYTHONPATH."""
    package = tmp_path / "site"
    (package / "meddling-1.dist-info").mkdir(parents=True)
    (package / "meddling-1.dist-info/METADATA").write_text("Name: meddling\nVersion: 1\n")
    (package / "meddling-1.dist-info/entry_points.txt").write_text(
        "[iobench.writers]\n"
        + "".join(f"{n.lower()} = meddling:{n}Writer\n" for n in ("Meeting", "Failing", "Wrong"))
    )
    (package / "meddling.py").write_text(_MEDDLING)
    return str(package)


def summaries(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(done.stdout)["summaries"]
    return found


def check_samples(record: ResultFile) -> None:
    """Each is cold, verified, and moved what the header says of its axes."""
    expected = {(one.operation, one.axes): one.bytes for one in record.run.variants}
    for one in record.samples:
        assert one.bytes == expected[one.operation, one.axes]
        assert 0 < one.first_done_s <= one.last_done_s == one.elapsed_s
        assert (one.first_done_s < one.last_done_s) == (one.axes.numjobs > 1)
        assert len(one.jobs_done_s) == (one.axes.numjobs if one.axes.numjobs > 1 else 0)
        assert min(one.jobs_done_s, default=one.first_done_s) == one.first_done_s
        if one.operation == "restore":
            assert one.cold is not None
            assert one.cold.resident_fraction <= 0.01
            assert one.verified is not None
            assert one.verified.mismatches == 0


def test_processes_side_by_side(
    iobench_inside: Command, tiny_path: Path, target: Path, tmp_path: Path
) -> None:
    """One and two processes in one run: twice the bytes and proofs, both ends shown."""
    arguments = ("run", "-w", tiny_path, "--target", target, "--writer", "buffered,peer:torch-save")
    more = (
        "--numjobs",
        "1,2",
        "--restore-as",
        "same,subset=0.3",
        "--repeat",
        "1",
        "--size",
        "full",
    )
    done = iobench_inside(*arguments, *more, "--no-ceiling", "-o", tmp_path / "run.jsonl")
    assert done.returncode == 0, done.stderr
    assert os.listdir(target) == []
    assert "first done (s)" in done.stdout
    assert "processes 1, 2 at once: a copy of rank 0 each" in done.stderr
    record = read(tmp_path / "run.jsonl")
    check_samples(record)
    assert len(record.samples) == 2 * 2 * 3
    by = {(s.writer, s.operation, s.axes.restore_as, s.axes.numjobs): s for s in record.samples}
    for (writer, operation, restore_as, numjobs), one in by.items():
        if numjobs == 2 and restore_as is None:
            single = by[writer, operation, None, 1]
            assert one.bytes == 2 * single.bytes
            if one.verified and single.verified:
                assert one.verified.tensors == 2 * single.verified.tensors
    shown = iobench_inside("show", tmp_path / "run.jsonl", "--format", "json")
    assert {one["verdict"] for one in summaries(shown)} == {"VALID"}
    assert iobench_inside("show", tmp_path / "run.jsonl", "--series").returncode == 0
    compared = iobench_inside("compare", tmp_path / "run.jsonl", tmp_path / "run.jsonl")
    assert compared.returncode == 0, compared.stderr
    assert "buffered numjobs=2 restore-as=subset=0.3" in compared.stdout


def test_serializers_and_granularities_side_by_side(
    iobench_inside: Command, tiny_path: Path, target: Path, tmp_path: Path
) -> None:
    """One file against many and format against format in one run; a peer has its own format."""
    done = iobench_inside(
        *("run", "-w", tiny_path, "--target", target, "--writer", "buffered,peer:safetensors"),
        *("--serializer", "safetensors,torch", "--granularity", "blob,layer", "--repeat", "1"),
        *("--size", "full", "--no-ceiling", "--format", "json", "-o", tmp_path / "run.jsonl"),
        *("--baseline", "buffered serializer=torch granularity=layer"),
    )
    assert done.returncode == 0, done.stderr
    record = read(tmp_path / "run.jsonl")
    assert "left out  peer:safetensors with --serializer torch" in done.stderr
    found = {(one["writer"], one["format"], one["granularity"]) for one in summaries(done)}
    assert found == {
        *(("buffered", f, g) for f in ("safetensors", "torch") for g in ("blob", "layer")),
        *(("peer:safetensors", None, g) for g in ("blob", "layer")),
    }
    assert {one["verdict"] for one in summaries(done)} == {"VALID"}
    assert {(v.axes.granularity, v.files) for v in record.run.variants} == {
        ("blob", 1),
        ("layer", 3),
    }
    for one in summaries(done):
        is_baseline = (one["writer"], one["format"], one["granularity"]) == (
            "buffered",
            "torch",
            "layer",
        )
        assert (one["ratio"] is None) == is_baseline
    for one in record.samples:
        assert (one.axes.numjobs, one.first_done_s) == (1, one.last_done_s)


def test_one_process_fails_or_brings_wrong_bytes(
    iobench: Command, tiny_path: Path, target: Path, tmp_path: Path
) -> None:
    """Its contender fails with the cause, or with wrong bytes; the others go on, all at once."""
    done = iobench(
        *("run", "-w", tiny_path, "--target", target, "--writer", "failing,meeting,wrong"),
        *("--numjobs", "2", "--repeat", "1", "--size", "full", "--no-ceiling", "--seed", "1"),
        *("-o", tmp_path / "run.jsonl"),
        PYTHONPATH=meddling(tmp_path),
    )
    assert done.returncode == 1, done.stderr
    cause = "failing numjobs=2 (JobError: process 2 of 2: OSError: [Errno 28] No space left"
    assert cause in done.stderr.splitlines()[-1]
    assert os.listdir(target) == []
    record = read(tmp_path / "run.jsonl")
    assert [(one.writer, one.axes.numjobs) for one in record.failures] == [("failing", 2)]
    met = [one for one in record.samples if one.writer == "meeting"]
    assert len(met) == 2
    wrong = [one.verified for one in record.samples if one.writer == "wrong" and one.verified]
    assert len(wrong) == 1
    assert all(0 < one.mismatches < one.tensors / 2 for one in wrong)
    assert record.end is not None
    assert record.end.status == "complete"
