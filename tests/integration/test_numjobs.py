"""`iobench run` with several processes and several values of its axes, as a user calls it."""

import json
import os
import subprocess
from typing import Any

from support.meddling import meddling
from support.sample_checks import check_samples

from iobench.results import read


def summaries(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(done.stdout)["summaries"]
    return found


def test_processes_side_by_side(iobench_inside, tiny_path, target, tmp_path) -> None:
    """One and two processes in one run: twice the bytes and proofs, both ends shown."""
    arguments = ("run", "-w", tiny_path, "--target", target, "--writer", "buffered,peer:torch-save")
    more = ("--numjobs", "1,2", "--restore-as", "same,tp=2", "--size", "full", "--no-fio")
    done = iobench_inside(*arguments, *more, "--repeat", "1", "-o", tmp_path / "run.jsonl")
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
            if operation == "restore":  # the clock ends with the last job, like that of ranks
                assert one.elapsed_s == max(one.jobs_done_s)
            if one.verified and single.verified:
                assert one.verified.tensors == 2 * single.verified.tensors
    shown = iobench_inside("show", tmp_path / "run.jsonl", "--format", "json")
    assert {one["verdict"] for one in summaries(shown)} == {"VALID"}
    text = (tmp_path / "run.jsonl").read_text()
    (tmp_path / "again.jsonl").write_text(text.replace(record.run.run_id, "0" * 16))
    compared = iobench_inside("compare", tmp_path / "run.jsonl", tmp_path / "again.jsonl")
    assert compared.returncode == 0, compared.stderr
    assert "buffered numjobs=2 restore-as=tp=2" in compared.stdout


def test_slices_of_processes(iobench_inside, tiny_path, target, tmp_path) -> None:
    """Two processes with the same files: one of them saves all, or both save slices; both restore
    all of it, and a part. One process alone is measured in between."""
    done = iobench_inside(
        *("run", "-w", tiny_path, "--target", target, "--writer", "buffered", "--numjobs", "1,2"),
        *("--slices", "off,all", "--restore-as", "same,tp=2", "--repeat", "2"),
        *("--size", "full", "--no-fio", "--format", "json", "-o", tmp_path / "run.jsonl"),
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(target) == []
    record = read(tmp_path / "run.jsonl")
    check_samples(record)
    assert {one["verdict"] for one in summaries(done)} == {"VALID"}
    size = record.run.workload.bytes
    both = [one for one in record.samples if one.axes.numjobs == 2]
    saves = {one.axes.slices: one for one in both if one.operation == "save"}
    assert {one.bytes for one in saves.values()} == {size}
    assert saves["off"].jobs_bytes == (size, 0)
    assert abs(saves["all"].jobs_bytes[0] - size / 2) <= 65536
    assert [one.stored and one.stored.problems for one in saves.values()] == [(), ()]
    alone = iobench_inside("run", "-w", tiny_path, "--target", target, "--slices", "all")
    assert alone.returncode == 2
    assert "--slices: one process saves; give --numjobs, or a launcher" in alone.stderr


def test_serializers_and_granularities_side_by_side(
    iobench_inside, tiny_path, target, tmp_path
) -> None:
    """One file against many and format against format in one run; a peer has its own format."""
    done = iobench_inside(
        *("run", "-w", tiny_path, "--target", target, "--writer", "buffered,peer:safetensors"),
        *("--serializer", "safetensors,torch", "--granularity", "blob,layer", "--repeat", "1"),
        *("--size", "full", "--no-fio", "--format", "json", "-o", tmp_path / "run.jsonl"),
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
    files = {(v.axes.granularity, v.files) for v in record.run.variants}
    assert files == {("blob", 1), ("layer", 3)}
    for one in summaries(done):
        place = (one["writer"], one["format"], one["granularity"])
        assert (one["ratio"] is None) == (place == ("buffered", "torch", "layer"))
    for one in record.samples:
        assert (one.axes.numjobs, one.first_done_s) == (1, one.last_done_s)


def test_one_process_fails_or_brings_wrong_bytes(iobench, tiny_path, target, tmp_path) -> None:
    """Its contender fails with the cause, or with wrong bytes; the others go on, all at once."""
    done = iobench(
        *("run", "-w", tiny_path, "--target", target, "--writer", "failing,meeting,wrong"),
        *("--numjobs", "2", "--repeat", "1", "--size", "full", "--no-fio", "--seed", "1"),
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
    assert record.end.status == "complete"
