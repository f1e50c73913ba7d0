"""`iobench run` over the ranks of a launcher: real processes, as torchrun or srun starts them."""

import os
import signal

import pytest
from support.filesystems import no_private_mounts
from support.meddling import meddling
from support.rank_commands import job_number, rank_commands, slurm
from support.ranks import torchrun_variables
from support.sample_checks import check_samples
from support.torchrun import torchrun

from iobench.report.summary import summarise
from iobench.results import read
from iobench.workloads import load
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target


def test_torchrun(tiny_path, target, tmp_path) -> None:
    """Both ranks of one node in one record: their own files, fio too, and rank 0 alone prints."""
    done = torchrun(
        [
            *("--nnodes", "1", "--nproc-per-node", "2", "--master-port", job_number()),
            *("--tee", "3", "-m", "iobench", "run", "-w", tiny_path, "--target", target),
            *("--size", "full", "--writer", "buffered,peer:torch-save", "--repeat", "1"),
            *("-o", tmp_path / "run.jsonl"),
        ],
        timeout=180,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert os.listdir(target) == []
    printed = done.stdout + done.stderr
    assert "[default1]:" not in printed, printed
    assert "ranks     2: the files of rank 0 to 1 of 2, each its own" in printed
    assert "network   lo (127.0.0.1" in printed
    record = read(tmp_path / "run.jsonl")
    check_samples(record)
    world = record.run.world
    assert (world.launcher, world.size, world.nodes) == ("torchrun", 2, 1)
    assert world.restored_from == (0, 1)
    assert len(record.samples) == 2 * 2
    for one in record.samples:  # rank 1 has 14 KB of the 6 MiB
        assert sum(one.jobs_bytes) == one.bytes
        assert 0 < one.jobs_bytes[1] < one.jobs_bytes[0] / 100
        cached = one.memory.page_cache_bytes  # of both ranks
        assert cached is None or cached >= one.bytes
    report = summarise(record)
    assert {one.verdict for one in report.summaries} == {"VALID"}
    alone = "all ranks are on one node: each restores what it wrote itself"
    noted = [one.operation for one in report.summaries if alone in one.reasons]
    assert noted == ["restore"] * 2
    assert not any(one.error for one in record.ceiling), record.ceiling


def test_two_nodes_of_slurm(tiny_path, target, tmp_path) -> None:
    """Each restores what the other node wrote. A writer that fails in rank 1 ends its own rows
    with the rank's name, wrong bytes there are found, and the exit code is that of rank 0."""
    job, more = job_number(), {"PYTHONPATH": meddling(tmp_path)}
    arguments = (
        *("run", "-w", tiny_path, "--target", target, "--writer", "failing,meeting,wrong"),
        *("--repeat", "1", "--size", "full", "--no-fio", "--seed", "1"),
        *("--restore-as", "same,tp=2", "-o", tmp_path / "run.jsonl"),
    )
    environments = [slurm(rank, 2, job) | more for rank in range(2)]
    machines = os.geteuid() == 0 and no_private_mounts() is None
    with rank_commands(arguments, environments, tmp_path, machines=machines) as ranks:
        (code, out, err), other = ranks.ends()
    assert code == 1, err
    assert other == (1, "", "")
    assert "Save:" in out
    host = os.uname().nodename
    cause = f"failing numjobs=2 (JobError: rank 1 (host {host}): OSError: [Errno 28] No space left"
    assert cause in err.splitlines()[-1]
    assert "nodes     2 (" in err
    assert os.listdir(target) == []
    record = read(tmp_path / "run.jsonl")
    world = record.run.world
    assert (world.launcher, world.nodes, world.restored_from) == ("slurm", 2, (1, 0))
    assert [one.writer for one in record.failures] == ["failing"]
    meeting = [one for one in record.samples if one.writer == "meeting"]
    assert [one.operation for one in meeting] == ["save", "restore", "restore"]
    # The small files of rank 1 are what rank 0 restores, and the other way round.
    assert [one.jobs_bytes[0] > one.jobs_bytes[1] for one in meeting] == [True, False, False]
    assert [one.verified and one.verified.mismatches for one in meeting] == [None, 0, 0]
    for one in meeting if machines else ():  # each counts what the device of both moves
        moved = one.device.write_bytes if one.operation == "save" else one.device.read_bytes
        assert moved is not None
        assert moved >= 1.98 * one.bytes
        assert (one.stored.unsynced_bytes, one.stored.problems) == (0, ())
        assert one.operation == "restore" or one.stored.flushed is True
        assert 0 < one.clock_error_s < 0.1
    wrong = [one.verified for one in record.samples if one.writer == "wrong" and one.verified]
    whole, slices = sorted(wrong, key=lambda one: -one.tensors)  # the files of rank 1 are wrong
    assert 0 < whole.mismatches < whole.tensors / 2
    assert slices.mismatches == 0  # rank 1 saves no safetensors file
    assert record.end.status == "complete"


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (("run", "--help"), 0, "Save and restore a checkpoint by each writer", ""),
        (("run", "--sizes", "1GiB"), 2, "", "No such option: --sizes"),
        (("run", "--numjobs", "2"), 2, "", "--numjobs: 2 ranks take part, started by torchrun"),
        (("run", "--background", "restore"), 2, "", "--background: 2 ranks take part, started by"),
    ],
)
def test_rank_0_alone_tells_what_all_ranks_know(arguments, code, out, err, tmp_path) -> None:
    """Help, and errors in the command line."""
    job = job_number()
    environments = torchrun_variables(range(2), job)
    with rank_commands(arguments, environments, tmp_path) as ranks:
        first, other = ranks.ends()
    assert other == (code, "", "")
    assert first[0] == code
    assert out in first[1]
    assert err in first[2]


def test_a_rank_without_the_writer_ends_all(tiny_path, target, tmp_path) -> None:
    """With its own error and exit code: one node lacks a package that rank 0 has."""
    job, site = job_number(), meddling(tmp_path)
    environments = torchrun_variables(range(2), job)
    environments[0]["PYTHONPATH"] = site
    arguments = (
        "run",
        "-w",
        tiny_path,
        "--target",
        target,
        "--writer",
        "meeting",
        "--size",
        "full",
    )
    with rank_commands(arguments, environments, tmp_path) as ranks:
        first, second = ranks.ends()
    assert [first[0], second[0]] == [2, 2], (first, second)
    assert "iobench run: unknown writer 'meeting'" in second[2]
    assert "iobench run: rank 1 (host" in first[2]
    assert "failed: UnknownNameError: unknown writer 'meeting'" in first[2]
    assert os.listdir(target) == []


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_rank_ends_in_a_save(how: str, tiny_path, target, tmp_path) -> None:
    """A killed rank is named at once, with its phase. An interrupt of all ranks, as torchrun sends
    it, ends them. Nothing stays in the target, and the record says how far the run came."""
    begun, job = tmp_path / "begun", job_number()
    more = {"PYTHONPATH": meddling(tmp_path), "STUCK": str(begun)}
    arguments = (
        *("run", "-w", tiny_path, "--target", target, "--writer", "stuck", "--size", "full"),
        *("--repeat", "1", "--no-fio", "-o", tmp_path / "run.jsonl"),
    )
    environments = [own | more for own in torchrun_variables(range(2), job)]
    with rank_commands(arguments, environments, tmp_path) as ranks:
        ranks.when(begun)
        if how == "killed":
            ranks.kill(1)
        else:
            for rank in (0, 1):
                ranks.kill(rank, signal.SIGTERM)
        (code, _, err), (other, out, other_err) = ranks.ends()
    message = err.splitlines()[-1]
    if how == "killed":
        assert (code, other) == (1, -signal.SIGKILL)
        assert "iobench run: rank 1 (host" in message
        assert "'save'" in message
        assert message.endswith("ended")
    else:
        assert (code, other) == (130, 130), err
        assert "interrupted" in message
    assert (out, other_err) == ("", "")
    assert os.listdir(target) == []
    record = read(tmp_path / "run.jsonl")
    assert record.samples == ()
    assert record.end.status == ("failed" if how == "killed" else "interrupted")


def test_a_bucket(server, tiny_path, tmp_path) -> None:
    """Ranks share it as they share a directory; no fio, no page cache, no device."""
    target, job = f"{server.target}/ranks", job_number()
    arguments = (
        *("run", "-w", tiny_path, "--target", target, "--writer", "s3", "--size", "full"),
        *("--repeat", "1", "--format", "json", "-o", tmp_path / "run.jsonl"),
    )
    environments = [own | server.environment for own in torchrun_variables(range(2), job)]
    with rank_commands(arguments, environments, tmp_path) as ranks:
        (code, _, err), other = ranks.ends()
    assert code == 0, err
    assert other == (0, "", "")
    record = read(tmp_path / "run.jsonl")
    check_samples(record)
    assert {one.verdict for one in summarise(record).summaries} == {"VALID"}
    assert [one.jobs_bytes[0] > one.jobs_bytes[1] for one in record.samples] == [True, False]
    with server.active():
        assert list(S3Objects(S3Writer().client, S3Target.parse(target)).names("")) == []


def test_replicas_restore_together(tiny_path, target, tmp_path) -> None:
    """Every rank saves the files of rank 0, and all restore those that rank 0 saved."""
    job = job_number()
    arguments = (
        *("run", "-w", tiny_path, "--target", target, "--writer", "odirect", "--repeat", "1"),
        *("--restore-mode", "all,broadcast,all-gather", "--size", "full", "--no-fio"),
        *("--restore-as", "same,tp=2"),
        *("-o", tmp_path / "run.jsonl"),
    )
    environments = torchrun_variables(range(2), job)
    with rank_commands(arguments, environments, tmp_path) as ranks:
        ends = ranks.ends()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "replicas of rank 0" in ends[0][2]
    assert os.listdir(target) == []
    record = read(tmp_path / "run.jsonl")
    check_samples(record)
    world = record.run.world
    assert world.restored_from == (0, 0)
    restores = [one for one in record.samples if one.operation == "restore"]
    assert len({(one.axes.restore_mode, one.axes.restore_as) for one in restores}) == 6
    assert {one.verdict for one in summarise(record).summaries} == {"VALID"}
    whole = [one for one in restores if one.axes.restore_as is None]
    received = {
        one.axes.restore_mode: one.paths["network"].bytes if "network" in one.paths else 0
        for one in whole
    }
    both = whole[0].bytes
    # Half of all bytes are those of one rank: the other one receives them, of either half.
    assert received == {"all": 0, "broadcast": both // 2, "all-gather": both // 2}
    # Of tensor parallelism each rank gets its slices, and with an exchange each byte is read once.
    cut = {one.axes.restore_mode: one for one in restores if one.axes.restore_as == "tp=2"}
    read_bytes = {
        mode: sum(count.bytes for path, count in one.paths.items() if path != "network")
        for mode, one in cut.items()
    }
    model = sum(spec.payload_bytes for spec in load(tiny_path).files() if "model" in spec.path)
    assert model < cut["all"].bytes < 1.1 * model  # of both ranks; each has the norms
    for mode in ("broadcast", "all-gather"):
        assert model <= read_bytes[mode] < 1.1 * model
    assert read_bytes["all"] > 1.2 * model


_MODEL = """
schema: iobench.workload/1
description: "Two layers of a llama in bf16, in one safetensors file"
model:
  name: small
  family: llama
  arch:
    vocab_size: 2048
    hidden_size: 1024
    num_layers: 2
    num_heads: 8
    ffn_hidden_size: 2752
layout:
  id: hf-export
  precision: bf16
"""


def test_peers_load_a_model_in_ranks(target, tmp_path) -> None:
    """Next to our writers: each rank by itself, and the Run:ai streamer in its distributed mode."""
    pytest.importorskip("runai_model_streamer")
    workload = tmp_path / "small.yaml"
    workload.write_text(_MODEL)
    peers = "peer:safetensors,peer:runai-streamer,peer:runai-streamer,distributed=true"
    done = torchrun(
        [
            *("--nnodes", "1", "--nproc-per-node", "2", "--master-port", job_number()),
            *("-m", "iobench", "run", "-w", workload, "--target", target, "--slices", "off"),
            *("--restore-mode", "all,all-gather", "--restore-as", "tp=2", "--size", "full"),
            *("--writer", f"odirect,{peers}", "--repeat", "1", "--no-ceiling"),
            *("-o", tmp_path / "run.jsonl"),
        ],
        timeout=180,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert os.listdir(target) == []
    record = read(tmp_path / "run.jsonl")
    assert {one.verdict for one in summarise(record).summaries} == {"VALID"}
    restores = [one for one in record.samples if one.operation == "restore"]
    found = [
        (one.writer, one.options.get("distributed"), one.axes.restore_mode) for one in restores
    ]
    assert sorted(found, key=str) == [
        ("odirect", None, "all"),
        ("odirect", None, "all-gather"),
        ("peer:runai-streamer", False, "all"),
        ("peer:runai-streamer", True, "all-gather"),
        ("peer:safetensors", None, "all"),
    ]
    assert len({one.bytes for one in restores}) == 1


def test_the_device_reads_a_model_once(new_filesystem, tmp_path) -> None:
    """By the counter of a device of its own: four ranks of tensor parallelism read the model
    once together. By themselves they read it again where it is cut by columns."""
    job, target, workload = job_number(), new_filesystem("ext4"), tmp_path / "small.yaml"
    workload.write_text(_MODEL)
    arguments = (
        *("run", "-w", workload, "--target", target, "--writer", "odirect", "--repeat", "1"),
        *("--restore-mode", "all,broadcast,all-gather", "--size", "full", "--no-fio"),
        *("--restore-as", "tp=4", "--slices", "all", "-o", tmp_path / "run.jsonl"),
    )
    environments = torchrun_variables(range(4), job)
    with rank_commands(arguments, environments, tmp_path) as ranks:
        ends = ranks.ends()
    assert [code for code, _, _ in ends] == [0] * 4, ends
    record = read(tmp_path / "run.jsonl")
    report = summarise(record)
    assert {one.verdict for one in report.summaries} == {"VALID"}
    told = [why for one in report.summaries for why in one.reasons if "from the device" in why]
    assert len(told) == 3
    model = sum(spec.size_bytes for spec in load(workload).files())
    restores = [one for one in record.samples if one.operation == "restore"]
    counted = {
        one.axes.restore_mode: one.device.read_bytes / model
        for one in restores
        if one.device is not None and one.device.read_bytes is not None
    }
    columns = sum(
        tensor.size_bytes
        for spec in load(workload).files()
        for tensor in spec.tensors
        if tensor.split == 1
    )
    assert 0.99 < counted["broadcast"] < 1.05
    assert 0.99 < counted["all-gather"] < 1.05
    alone = 1 + 3 * columns / model
    assert alone * 0.99 < counted["all"] < alone * 1.05
