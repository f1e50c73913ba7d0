"""`iobench run` on a bucket: the real command and a real server; no object is left."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from support.preloaded import Preloaded

from iobench.bench.choose import target_of
from iobench.bench.contenders.base import WriterContender
from iobench.bench.targets.bucket import Holder
from iobench.results import read
from iobench.testing import Bucket, LocalS3
from iobench.writers.registry import make

_RUN = ("run", "--workload", "llama7b", "--size", "48MiB", "--repeat", "1")


def test_s3_local(iobench, tmp_path, server) -> None:
    """--s3-local saves and restores on a server of its own, and the record says so."""
    output = tmp_path / "run.jsonl"
    how = ("--writer", "s3,threads=2", "--s3-local", "--format", "json", "-o", output)
    done = iobench(*_RUN, *how)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    summaries = {entry["operation"]: entry for entry in report["summaries"]}
    assert set(summaries) == {"save", "restore"}
    for summary in summaries.values():
        assert summary["verdict"] == "VALID (scaled)", summary["reasons"]
    assert any("server's caches" in reason for reason in summaries["restore"]["reasons"])
    assert "part upload" in summaries["save"]["paths"]
    assert "ranged get" in summaries["restore"]["paths"]
    assert "fio does not measure S3" in done.stderr
    result = read(output)
    assert result.run.environment.storage.fs_type == "s3"
    assert result.run.plan["target"] == "s3://iobench/run"
    assert all(
        sample.verified and not sample.verified.mismatches
        for sample in result.samples
        if sample.operation == "restore"
    )


def test_a_bucket(iobench_inside, tmp_path, server) -> None:
    """A run in a bucket leaves no object, and writes no credential anywhere."""
    output = tmp_path / "run.jsonl"
    target = f"{server.target}/somewhere"
    command = (*_RUN, "--writer", "null,s3,checksum=crc32c", "--target", target, "-o", output)
    done = iobench_inside(*command, **server.environment)
    assert done.returncode == 0, done.stderr
    with server.active():
        assert not Bucket(target).names()
    for text in (done.stdout, done.stderr, output.read_text()):
        assert server.secret_key not in text
        assert server.access_key not in text


@contextmanager
def _run_of_many(target: str, record: Path, server: LocalS3) -> Iterator[subprocess.Popen[str]]:
    """A run of 50 repetitions, once it has restored."""
    command = ["-m", "iobench", *_RUN, "--writer", "s3", "--target", target]
    with Preloaded(
        [*command, "--repeat", "50", "-o", record],
        stderr=subprocess.PIPE,
        env={**os.environ, **server.environment},
    ) as child:
        while " s3 restore:" not in child.stderr.readline():
            assert child.poll() is None
        yield child


def test_interrupted(tmp_path, server) -> None:
    """Ctrl-C removes objects and uploads, and exits with 130."""
    target = f"{server.target}/interrupted"
    with _run_of_many(target, tmp_path / "run.jsonl", server) as child:
        time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, rest = child.communicate()
    assert child.returncode == 130, rest
    with server.active():
        assert not Bucket(target).names()


def test_what_a_killed_run_left_is_removed(tmp_path, server) -> None:
    """kill -9 leaves objects and uploads, which the next run in that place removes. Those of a live
    run and of another machine stay."""
    target = f"{server.target}/killed"
    with _run_of_many(target, tmp_path / "killed.jsonl", server) as child:
        with server.active():
            with target_of(target, [WriterContender(make("s3"))]).scratch():
                alive = Bucket(target).names()  # the child's and our own
            assert len({name.split("/")[0] for name in alive}) == 2
        child.kill()
    elsewhere = ".iobench-run-elsewhere/lock"
    with server.active():
        left = Bucket(target).names()
        assert left
        Bucket(target).put(elsewhere, replace(Holder.ourselves(), boot="another").to_bytes())
        with target_of(target, [WriterContender(make("s3"))]).scratch():
            pass
        assert Bucket(target).names() == {elsewhere}
