"""`iobench autotune` on real storage with tiny sizes: its file, its messages, and that nothing is
left."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli import app
from support.preloaded import Preloaded

import iobench
from iobench.bench.targets import base
from iobench.bench.targets.directory import PREFIX
from iobench.errors import IobenchError, TargetError
from iobench.tune import tuning as tuning_module
from iobench.tune.journal import read_journal
from iobench.writers.config import read_config
from iobench.writers.image import FileImage

Tune = Callable[..., dict[str, Any]]

_BYTES = 60 * 2**20
_QUICK = ("--max-time", "2h", "--max-bytes", "60MiB", "--size", "1536KiB")
_PATIENCE_S = 200


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "writer.toml"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "tune.jsonl"


@pytest.fixture
def tune(tiny_path, output, journal, capfd, monkeypatch) -> Tune:
    """Runs `iobench autotune` here; its document. Not waiting for the device between trials."""
    monkeypatch.setattr(base, "settled", lambda *_: nullcontext())

    def run(target: str | Path, *more: str | Path) -> dict[str, Any]:
        arguments = ["autotune", "-w", tiny_path, "--target", target, *_QUICK, "-o", output]
        arguments += ["--journal", journal, "--format", "json", *more]
        app([str(one) for one in arguments], standalone_mode=False)
        document: dict[str, Any] = json.loads(capfd.readouterr().out)
        return document

    return run


def check(document: dict[str, Any], output: Path) -> None:
    """The file has the chosen writer, can be loaded, and agrees with the document."""
    chosen, *others = document["confirmed"]
    config = read_config(output)
    writer = iobench.load_writer(output)
    assert writer.name == config.name == chosen["writer"]
    assert writer.options.to_dict() == chosen["options"]
    # One that was given up early and is the best at the end has fewer: nothing is decided then.
    assert config.tuned.samples == chosen["samples"] >= (1 if document["refuted"] else 5)
    assert config.tuned.baseline == document["baseline"]
    assert config.tuned.runner_up == document["runner_up"]
    assert set(config.tuned.paths) == set(chosen["paths"])
    assert document["written_bytes"] <= _BYTES
    if not document["refuted"]:
        assert document["keep_baseline"] is not (chosen["finding"] == "better")
    assert document["reasons"][0].startswith("keep ") is document["keep_baseline"]
    assert config.tuned.finding == document["reasons"][0]
    assert all(one["samples"] >= 5 for one in others)


def test_on_a_file_system(tune, target, output, journal, capfd, monkeypatch) -> None:
    """The writer of the file takes the measured path; no other file is left.

    The complete journal gives the same file and document again without a trial, unchanged.
    """
    document = tune(target, "--writer", "buffered,odirect")
    check(document, output)
    assert os.listdir(target) == []
    tuned = read_config(output).tuned
    assert tuned.target == str(target)
    writer = iobench.load_writer(output)
    image = FileImage.of("file", [np.ones(2**20 + 1, np.uint8)])
    moved = [writer.write(image, target), writer.read(image, target)]
    assert {path for one in moved for path in one.paths} <= set(tuned.paths)
    assert tuned.paths
    whole, again = journal.read_bytes(), journal.with_name("again.toml")
    monkeypatch.delattr(tuning_module.Tuning, "runner")
    arguments = ["autotune", "--resume", str(journal), "-o", str(again), "--format", "json"]
    app(arguments, standalone_mode=False)
    shown = capfd.readouterr()
    assert json.loads(shown.out) == document
    assert "complete, so its answer is given again and nothing is measured" in shown.err
    assert again.read_text() == output.read_text()
    assert journal.read_bytes() == whole


def test_in_a_bucket(tune, output, server) -> None:
    """Only `s3` works there, compared with its own defaults; no object is left."""
    with server.active():
        document = tune(f"{server.target}/tuned", "--max-bytes", "44MiB")  # as few as it takes
        check(document, output)
    assert document["space"]["writers"] == ["s3"]
    assert document["baseline"] == "s3"
    assert list((server.directory / server.bucket).rglob("*step-*")) == []


@pytest.mark.parametrize("more", [(), ("--writer", "s3")], ids=str)
def test_a_bucket_that_is_not_there(tune, server, more: tuple[str, ...]) -> None:
    """The error says so, and not that no writer works."""
    with server.active(), pytest.raises(TargetError, match="no such bucket") as caught:
        tune("s3://no-such-bucket/tuned", *more)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("objective", ["balanced", "stall"])
def test_objectives(tune, target, output, journal, objective: str) -> None:
    """Each objective measures what it is about."""
    more = ("--max-bytes", "80MiB") if objective == "stall" else ()
    document = tune(target, "--objective", objective, "--writer", "odirect", *more)
    assert document["baseline"] == "odirect"
    tuned = read_config(output).tuned
    assert ("per " if objective == "stall" else "iB/s") in tuned.median
    measured = [one.measured for one in read_journal(journal)[1]]
    assert all((one.stall_s is not None) == (objective == "stall") for one in measured)
    restores = [one.restore is not None for one in measured]
    assert any(restores)
    assert all(restores) or objective == "stall"
    assert os.listdir(target) == []


def test_a_dry_run(tune, target, output, journal, capfd) -> None:
    """It prints space, and the most time and bytes; it measures nothing and leaves no file."""
    arguments = ["autotune", "-w", "llama7b", "--target", target, "--dry-run", "-o", output]
    arguments += ["--writer", "odirect", "--size", "64MiB", "--max-bytes", "3GiB"]
    arguments += ["--max-time", "2h"]
    app([*map(str, arguments), "--journal", str(journal)], standalone_mode=False)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "space     72 settings of odirect" in shown.err
    assert "2 h 0 min and 3.00 GiB written at most" in shown.err
    assert not output.exists()
    assert not journal.exists()
    assert os.listdir(target) == []


@pytest.fixture
def start(tiny_path, target, output, journal) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Start the command as a process of its own, and wait for so many trials."""
    started: list[subprocess.Popen[str]] = []

    def begin(trials: int) -> subprocess.Popen[str]:
        process = Preloaded(
            [
                *("-m", "iobench", "autotune", "-w", tiny_path, "--target", target),
                *(*_QUICK, "-o", output, "--journal", journal, "--writer", "buffered,odirect"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        deadline = time.monotonic() + _PATIENCE_S
        while not (journal.exists() and journal.read_text().count('"kind": "trial"') >= trials):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_interrupted_and_resumed(start, tune, target, output, journal, capfd) -> None:
    """Ctrl-C leaves only the journal; --resume measures what is missing."""
    process = start(8)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=_PATIENCE_S)
    assert (process.returncode, stdout) == (130, ""), stderr
    assert stderr.splitlines()[-2:] == [
        f"go on with iobench autotune --resume {journal}",
        "iobench: interrupted; temporary files are removed",
    ]
    assert os.listdir(target) == []
    assert not output.exists()
    before = journal.read_bytes()
    arguments = ["autotune", "--resume", str(journal), "-o", str(output), "--format", "json"]
    app(arguments, standalone_mode=False)
    check(json.loads(capfd.readouterr().out), output)
    assert journal.read_bytes().startswith(before)
    trials = read_journal(journal)[1]
    assert len(trials) == len({(t.phase, t.round, t.writer, str(t.options)) for t in trials})
    assert os.listdir(target) == []


def test_a_target_that_disappears(start, target, journal) -> None:
    """The tuning ends with one line and the journal; no setting is blamed."""
    process = start(4)
    gone = target.rename(target.with_name(f"{target.name}-gone"))
    _, stderr = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 2, stderr
    assert stderr.splitlines()[-1].startswith(f"iobench autotune: --target {target}: ")
    assert not any(one.measured.error for one in read_journal(journal)[1])
    assert not list(gone.glob(f"{PREFIX}*/step-*/*"))


# Bad input.


@pytest.fixture
def refused(tiny_path, target, output, capfd) -> Callable[..., None]:
    """Run `iobench autotune`, which must fail and leave no file."""

    def call(code: int, words: str, *arguments: str | Path) -> None:
        given = [str(argument) for argument in arguments]
        options = {"-o": output}
        if "--resume" not in given:
            journal = output.with_name("refused.jsonl")
            options |= {"-w": tiny_path, "--target": target, "--journal": journal}
        defaults = [str(x) for pair in options.items() if pair[0] not in given for x in pair]
        with pytest.raises(IobenchError) as caught:
            app(["autotune", *defaults, *given], standalone_mode=False)
        assert caught.value.exit_code == code
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
        assert capfd.readouterr().out == ""
        assert os.listdir(target) == []
        assert not output.exists()

    return call


def test_a_journal_that_exists(refused, tmp_path, monkeypatch) -> None:
    """It is refused before the target is inspected and any writer is tried, and is not changed."""

    def planned(**_: object) -> None:
        raise AssertionError("the tuning was planned first")

    monkeypatch.setattr(tuning_module.Tuning, "of", planned)
    journal = tmp_path / "older.jsonl"
    journal.write_text("measured\n")
    refused(2, f"go on with it by --resume {journal}", "--journal", journal)
    refused(2, "exists and is not overwritten", "--journal", journal, "--dry-run")
    assert journal.read_text() == "measured\n"


def test_a_journal_that_is_not_gone_on_with(refused, tmp_path) -> None:
    """In a dry run, because resuming would write, and on another machine, whose samples cannot be
    combined with new ones. The journal is not changed."""
    journal = tmp_path / "refused.jsonl"
    refused(2, "--max-time is too small", "--max-time", "10ms", "--size", "4MiB")
    before = journal.read_bytes()
    refused(2, "leave out --dry-run", "--resume", journal, "--dry-run")
    assert journal.read_bytes() == before
    other = before.replace(read_journal(journal)[0].fingerprint.encode(), b"0" * 12)
    journal.write_bytes(other)
    refused(2, "another machine or storage", "--resume", journal)
    assert journal.read_bytes() == other


def test_a_journal_whose_target_is_gone(refused, tmp_path, target) -> None:
    """The message names no option that was not given; the journal is not changed."""
    journal = tmp_path / "refused.jsonl"
    refused(2, "--max-time is too small", "--max-time", "10ms", "--size", "4MiB")
    before = journal.read_bytes()
    gone = target.rename(target.with_name(f"{target.name}-gone"))
    target.symlink_to("nowhere")
    with pytest.raises(IobenchError, match=f"^the journal's target {target}: ") as caught:
        app(
            ["autotune", "--resume", str(journal), "-o", str(tmp_path / "w.toml")],
            standalone_mode=False,
        )
    assert "--target" not in str(caught.value)
    assert journal.read_bytes() == before
    target.unlink()
    gone.rename(target)


def test_a_journal_of_another_workload(refused, tmp_path, target) -> None:
    """The file of the workload was changed meanwhile; an old journal does not say what it was."""
    journal, workload = tmp_path / "refused.jsonl", tmp_path / "own.yaml"
    tiny = Path(__file__).with_name("tiny.yaml").read_text()
    workload.write_text(tiny)
    short = ("--max-time", "10ms", "--size", "4MiB")
    refused(2, "--max-time is too small", "-w", str(workload), *short)
    refused(2, "--max-time is too small", "--resume", journal)
    workload.write_text(tiny.replace("layers: 2", "layers: 3"))
    assert workload.read_text() != tiny
    refused(2, "files of workload", "--resume", journal)
    digest = read_journal(journal)[0].files_sha256
    journal.write_text(journal.read_text().replace(digest, ""))
    refused(2, "--max-time is too small", "--resume", journal)
