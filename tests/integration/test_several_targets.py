"""`iobench run` on several targets at once: real file systems, a bucket, a full disk, Ctrl-C."""

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.preloaded import Preloaded, run_preloaded

from iobench.bench.targets.directory import PREFIX
from iobench.environment import fio_version
from iobench.results import ResultFile, read
from iobench.testing import Bucket
from iobench.units import MIB

_PATIENCE_S = 200


@pytest.fixture
def places(shared_filesystems: Callable[..., Path], target: Path) -> tuple[Path, Path]:
    """An empty directory on ext4 and an empty tmpfs."""
    return target, shared_filesystems("tmpfs", 512 * MIB)


def arguments(tiny_path: Path, *targets: object, repeat: int = 2) -> list[str]:
    names = ",".join(map(str, targets))
    return [
        *("run", "-w", str(tiny_path), "--target", names, "--size", "full"),
        *("--repeat", str(repeat)),
    ]


@pytest.mark.skipif(fio_version() is None, reason="fio is not installed")
def test_two_file_systems(iobench_inside, tiny_path, places, tmp_path) -> None:
    """Every writer and fio job in both, by two processes; the record shows the same."""
    record = tmp_path / "run.jsonl"
    how = ("--writer", "buffered", "--numjobs", "2", "-o", str(record), "--format", "json")
    done = iobench_inside(*arguments(tiny_path, *places, repeat=1), *how)
    assert done.returncode == 0, done.stderr
    assert [os.listdir(place) for place in places] == [[], []]
    document = json.loads(done.stdout)
    rows = Counter((one["target"], one["operation"]) for one in document["summaries"])
    assert rows == {(str(p), operation): 1 for p in places for operation in ("save", "restore")}
    kinds = [one["fs_type"] for one in document["environment"]["storages"].values()]
    assert kinds == ["ext4", "tmpfs"]
    for place in places:
        assert document["ceilings"][str(place)]["save_bytes_per_s"] > 0
        assert f"buffered numjobs=2 target={place} save: " in done.stderr
    (winner,) = document["target_winners"]  # no restore from tmpfs is cold
    assert winner["operation"] == "save"
    assert {s.verified.mismatches for s in read(record).samples if s.verified} == {0}
    shown = iobench_inside("show", record, "--format", "json")
    assert json.loads(shown.stdout)["summaries"] == document["summaries"]


def test_a_directory_and_a_bucket(iobench_inside, tiny_path, target, tmp_path, server) -> None:
    """The default writers take part where they work; no file or object is left."""
    bucket, record = f"{server.target}/several", tmp_path / "run.jsonl"
    how = ("--no-fio", "-o", str(record))
    command = arguments(tiny_path, target, bucket, repeat=1)
    done = iobench_inside(*command, *how, **server.environment)
    assert done.returncode == 0, done.stderr
    assert os.listdir(target) == []
    with server.active():
        assert not Bucket(bucket).names()
    assert f"left out  {bucket}: writer 'buffered' writes files" in done.stderr
    assert f"target    {bucket}\n" in done.stderr
    took_part = {(one.writer, one.axes.target) for one in read(record).samples}
    assert ("s3", bucket) in took_part
    assert ("buffered", str(target)) in took_part
    assert not {("s3", str(target)), ("buffered", bucket)} & took_part
    assert done.stdout.startswith("Target:  1 sample cannot name the faster one")


_BREAKING = """
import os, sys
from iobench.cli import main
from iobench.writers.buffered import BufferedWriter as Buffered
from support.filesystems import shut_down

def write_many(self, images, target, **options):
    if str(target).startswith(broken) and "step-1-" in str(target):
        BREAK(broken)
    return real(self, images, target, **options)

def fill(broken):
    with open(os.path.join(broken, "filler"), "ab") as filler:
        found = os.statvfs(broken)
        os.posix_fallocate(filler.fileno(), 0, max(found.f_bavail - 16, 1) * found.f_frsize)

broken = sys.argv.pop(1)
real, Buffered.write_many = Buffered.write_many, write_many
main.run()
"""


def broken_run(
    how: str, broken: Path, tiny_path: Path, target: Path, writers: str, record: Path
) -> tuple[str, str, ResultFile]:
    """A run on two targets; `how` breaks one of them in the second repetition.

    The exit code is 1, and nothing is left in the other. Returns stdout, the last line of stderr,
    and the record.
    """
    done = run_preloaded(
        [
            *("-c", _BREAKING.replace("BREAK", how), broken),
            *arguments(tiny_path, target, broken, repeat=3),
            *("--writer", writers, "--no-fio", "-o", record),
        ],
        timeout=_PATIENCE_S,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(target) == []
    return done.stdout, done.stderr.splitlines()[-1], read(record)


@pytest.mark.root
def test_a_disk_that_fills_up(new_filesystem, tiny_path, target, tmp_path) -> None:
    """In the second repetition: the other target is measured completely, and the exit code is 1."""
    small, record = new_filesystem("tmpfs", 512 * MIB), tmp_path / "run.jsonl"
    stdout, error, result = broken_run("fill", small, tiny_path, target, "buffered", record)
    assert "No space left on device" in error
    assert os.listdir(small) == ["filler"]
    assert result.incomplete is None
    (failure,) = result.failures
    assert (failure.axes.target, failure.operation) == (str(small), "save")
    saves = Counter(one.axes.target for one in result.samples if one.operation == "save")
    assert saves == {str(target): 3, str(small): 1}
    assert f"buffered target={small} save" in stdout


@pytest.mark.root
def test_a_disk_that_dies(new_filesystem, tiny_path, target, tmp_path) -> None:
    """In the second repetition: every row of its target fails, the others go on, exit code 1."""
    lost, record = new_filesystem("ext4", 512 * MIB), tmp_path / "run.jsonl"
    writers = "buffered,uncached"
    stdout, error, result = broken_run("shut_down", lost, tiny_path, target, writers, record)
    assert f"{lost}/{PREFIX}" in error  # what the next run removes
    failed = {(one.writer, one.axes.target) for one in result.failures}
    assert failed == {("buffered", str(lost)), ("uncached", str(lost))}
    either = ("Input/output error", "Read-only file system")  # after the kernel's own abort
    assert all(any(text in one.error for text in either) for one in result.failures)
    saves = Counter(
        (one.writer, one.axes.target) for one in result.samples if one.operation == "save"
    )
    assert saves["buffered", str(target)] == saves["uncached", str(target)] == 3
    assert saves["buffered", str(lost)] == 1
    assert f"buffered target={lost} save" in stdout


def test_one_interrupt_cleans_every_target(tiny_path, places, tmp_path) -> None:
    """During a write to any of them. The table of the samples so far is printed."""
    with Preloaded(
        [
            *("-m", "iobench", *arguments(tiny_path, *places, repeat=1000)),
            *("--writer", "buffered", "--no-fio", "-o", tmp_path / "run.jsonl"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        seen: set[str] = set()
        while len(seen) < 2:  # both have been measured
            line = process.stderr.readline()
            assert line, process.poll()
            seen |= {str(place) for place in places if f"target={place} restore: " in line}
        assert all(next(place.iterdir()).name.startswith(PREFIX) for place in places)
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 130
    assert stdout.startswith("Stopped: ")
    assert [os.listdir(place) for place in places] == [[], []]
    end = read(tmp_path / "run.jsonl").end
    assert end.status == "interrupted"
