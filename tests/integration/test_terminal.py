"""Every command on a terminal: lines fit into 80 columns, and no name or figure is broken."""

import contextlib
import functools
import io
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.cli import app
from typer.main import get_command

import iobench.environment
from iobench.bench import planning
from iobench.bench.targets import base
from iobench.cli import main, s3
from iobench.environment import memory
from iobench.integrations.redirect import launch
from iobench.integrations.redirect.call_counts import Count, Function
from iobench.report import tuning
from iobench.report.render import render
from iobench.writers.s3_store.objects import UnfinishedUpload
from iobench.writers.s3_store.target import S3Target

ROOT = Path(__file__).parents[2]
HEADERS = {
    f"results/{path.name}": json.loads(path.read_text().partition("\n")[0])
    for path in sorted((ROOT / "results").glob("reference-*.jsonl"))
}
RECORDS = {name: one for name, one in HEADERS.items() if one["schema"] == "iobench.result/1"}
CLAIMS = {
    "hybrid-io": ("hybrid-io-llama7b", "hybrid-io-train-llama7b"),
    "checkfreq": ("checkfreq-gpt5b-nemo", "checkfreq-llama3-8b"),
    "pccheck": ("pccheck-gpt5b-nemo", "pccheck-llama3-8b"),
    "async": ("async-gpt5b-nemo",),
}
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_BARS = re.compile("[─▁▂▃▄▅▆▇█·]+")  # rules and bars: as long as the width allows
_BROKEN_FIGURE = re.compile(r"\d\n *(?:[KMGT]i?B|B|ms|s|min|h|%)(?:/s)?(?=[\s,;)])")
_HINT = "a wider terminal also shows: "


class Output(io.StringIO):
    """The kind of stdout and stderr: a terminal, or a pipe."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a short name: a line is at least as long as a path in it."""
    monkeypatch.setenv("TERM", "xterm")  # rich takes a dumb terminal for 80 columns wide
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name:
        monkeypatch.chdir(name)
        os.mkdir("results")
        for record in RECORDS:
            os.symlink(ROOT / record, record)
        shutil.copy(Path(__file__).with_name("tiny.yaml"), "tiny.yaml")
        yield Path(name)


def printed(*arguments: str, columns: int | None) -> tuple[str, str]:
    """Return what the command prints on stdout and stderr: terminals of `columns` columns, or
    pipes."""
    outputs = [Output(terminal=columns is not None) for _ in range(2)]
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(outputs[0]),
        contextlib.redirect_stderr(outputs[1]),
    ):
        patch.setenv("COLUMNS", str(columns or 80))
        app(list(arguments), standalone_mode=False)
    first, second = (_CONTROLS.sub("", one.getvalue()) for one in outputs)
    return first, second


def check_fits(shown: str, uncut: str, columns: int = 80) -> None:
    """No line is wider, no figure is separated from its unit, and each word is one of `uncut`."""
    assert uncut.strip()
    assert [line for line in shown.splitlines() if len(line) > columns] == []
    assert _BROKEN_FIGURE.findall(shown) == []
    words = {one.rstrip(",:") for one in _BARS.sub("", uncut + _HINT).split()} | {"\\"}
    assert {one.rstrip(",:") for one in _BARS.sub("", shown).split()} - words == set()


def _tables() -> Iterator[tuple[str, ...]]:
    """The arguments of each command that prints a table from files."""
    for record, header in RECORDS.items():
        yield "show", record
        if header["plan"].get("verb") != "train":
            yield "show", record, "-v"
    one, other = "results/reference-llama7b.jsonl", "results/reference-aa-llama7b.jsonl"
    numjobs = "results/reference-numjobs-llama7b-zero3.jsonl"
    for nodes in ("2048", "64-1024"):
        yield "plan", "--nodes", nodes, "--results", one
    by_hand = ("plan", "--save", "30s", "--restore", "1min", "--blocking", "2s")
    yield *by_hand, "--nodes", "1024"
    yield "compare", one, other, "--force"
    yield "compare", "results/reference-peers-llama7b.jsonl", numjobs, "--force"
    for claim, names in CLAIMS.items():
        given = (("--results", f"results/reference-{name}.jsonl") for name in names)
        yield "reproduce", claim, *(word for pair in given for word in pair)
    for name in ("llama7b", "gpt5b-nemo", "mlperf-405b"):
        yield "workloads", "show", name, "--files"
    yield "workloads", "show", "tiny.yaml", "--files"
    yield "workloads", "list"
    yield ("writers",)
    yield ("doctor",)


@pytest.mark.parametrize("arguments", [*_tables()], ids=" ".join)
def test_a_table_fits(arguments: tuple[str, ...], monkeypatch) -> None:
    """Columns are dropped and named below the table; text is wrapped between words."""
    for name in ("describe_machine", "describe_storage", "probe_directory"):  # figures may move
        once = functools.cache(getattr(iobench.environment, name))
        monkeypatch.setattr(iobench.environment, name, once)
    pages = functools.cache(memory.new_pages_bytes_per_s)
    monkeypatch.setattr(memory, "new_pages_bytes_per_s", pages)
    uncut, _ = printed(*arguments, columns=None)
    assert _HINT not in uncut
    for columns in (80, 160):
        shown, _ = printed(*arguments, columns=columns)
        check_fits(shown, uncut, columns)


def _helps(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from _helps(below, (*path, name))


_HELPS = dict(_helps(get_command(app)))


@pytest.mark.parametrize("path", _HELPS, ids=lambda path: " ".join(("iobench", *path)))
def test_help_fits(path) -> None:
    """Every sentence of the command and its options is complete, in 80 columns."""
    command = _HELPS[path]
    shown, _ = printed(*path, "--help", columns=80)
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert not re.search(r"[a-z]\.\.\.", shown)  # a sentence that is cut; usage lines have them too
    flat = " ".join(shown.split())
    for sentence in (command.help, *(getattr(one, "help", "") for one in command.params)):
        assert " ".join((sentence or "").split()) in flat
    for below in getattr(command, "commands", {}).values():
        first, end, _ = " ".join(below.help.split("\n\n")[0].split()).partition(". ")
        assert first + end.strip() in flat


def test_a_run_fits(monkeypatch) -> None:
    """A run's plan and its report."""
    monkeypatch.setattr(base, "settled", lambda *_: contextlib.nullcontext())
    common = ("run", "tiny.yaml", "--size", "full", "--no-fio", "--repeat", "1")
    common += (
        "--numjobs",
        "1,2",
        "--restore-as",
        "same,tp=2",
        "--writer",
        "buffered,odirect",
    )
    monkeypatch.setattr(planning, "expected_line", lambda _: "expected  about 5.1 s")
    (_, uncut), (_, plan) = (printed(*common, "--dry-run", columns=one) for one in (None, 80))
    waits = ("reading the workload and trying the writers ...", "probing the writers ...")
    assert all(one in plan for one in waits)
    free = re.compile(r"[\d.]+(?= \S+ usable)")  # others write to this file system too
    check_fits(free.sub("", plan), f"{free.sub('', uncut)} {' '.join(waits)}")
    shown, _ = printed(*common, "-q", "-o", "run.jsonl", columns=80)
    check_fits(shown, printed("show", "run.jsonl", columns=None)[0])


_FIRST = pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (("run", "nope"), ["reading the workload and trying the writers"]),
        (("autotune", "nope"), ["loading torch", "trying the writers"]),
        (("train", "nope"), ["loading torch and trying the writers"]),
        (("reproduce", "nope"), ["reading the claims"]),
    ],
    ids=lambda value: value[0],
)


_ENDS_AT_IMPORTS = """
import os, sys

class Ends:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "torch", "pandas", "optuna", "boto3"):
            os.write(2, b"import of " + name.encode())
            os._exit(0)

sys.meta_path.insert(0, Ends())
from iobench.cli.main import run
run()
"""


@_FIRST
def test_the_first_line_comes_before_what_takes_long_to_load(arguments, first) -> None:
    """On a real terminal, from a new interpreter."""
    ours, theirs = os.openpty()
    with open(ours, "rb", buffering=0) as screen, open(theirs, "wb", buffering=0) as terminal:
        command = [sys.executable, "-c", _ENDS_AT_IMPORTS, *arguments]
        subprocess.run(command, stdout=terminal, stderr=terminal, check=True, timeout=60)
        shown = ""  # a read may return a part of it
        while "import of " not in shown and select.select([screen], [], [], 10)[0]:
            shown += screen.read(1000).decode()
    assert shown.startswith(f"{first[0]} ...import of ")


def test_an_error_fits() -> None:
    """It is one line in a pipe, and wrapped on a terminal."""
    message = "--max-time is too small to compare hybrid with one other setting: give at least 10 s"
    shown = []
    for terminal in (False, True):
        stderr = Output(terminal=terminal)
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(stderr):
            patch.setenv("COLUMNS", "80")
            with pytest.raises(SystemExit, match="2"):
                main._fail(f"{message}: at least 100 s; or choose fewer by --writer", 2)
        shown.append(stderr.getvalue())
    uncut, fitted = shown
    assert (uncut.count("\n"), fitted.count("\n")) == (1, 2)
    check_fits(fitted, uncut)


def test_the_report_of_autotune_fits(monkeypatch) -> None:
    """Labels of settings are long; so is what a setting failed for."""
    monkeypatch.setattr(base, "settled", lambda *_: contextlib.nullcontext())
    uncut = Output(terminal=False)
    make = tuning.tuning_document

    def twice(path: Any, outcome: Any) -> Any:
        document = make(path, outcome)
        render(document, "table", uncut)
        return document

    monkeypatch.setattr(tuning, "tuning_document", twice)
    budget = ("--max-time", "2h", "--max-bytes", "60MiB", "--size", "1536KiB")
    writers = ("--writer", "buffered,odirect")
    shown, _ = printed("autotune", "tiny.yaml", "-q", *writers, *budget, columns=80)
    check_fits(shown, uncut.getvalue())


def test_the_summary_of_exec_fits(monkeypatch) -> None:
    count = Count(calls=12, bytes=2**31, seconds=1.5, example="checkpoints/step-1200/model.pt")
    failed = Count(calls=1, seconds=0.1, example="checkpoints/step-1300/optimizer.pt")
    stock = {"its path is a file object that is not a file of the operating system": count}
    function = Function(redirected=count, failed=failed, stock=stock, fallbacks={"a fallback": 3})
    outcome = launch.ExecOutcome(
        returncode=0, elapsed_s=2.0, functions={"torch.save": function}, problems=(), processes=2
    )
    monkeypatch.setattr(launch, "launch", lambda *_: outcome)
    command = ("exec", "--config", "buffered", "--", "true")
    (_, uncut), (_, shown) = (printed(*command, columns=one) for one in (None, 80))
    check_fits(shown, uncut)
    assert len(shown.splitlines()) > len(uncut.splitlines())


def test_the_list_of_uploads_fits(monkeypatch) -> None:
    """A key longer than the rest of the line begins a new line."""
    keys = ("runs/a/step-1200/model.safetensors", "a-name-of-sixty-characters/" + "x" * 35)
    when = datetime(2026, 1, 2, tzinfo=UTC)
    found = [
        UnfinishedUpload(target=S3Target(bucket="bucket", key=key), upload_id="1", initiated=when)
        for key in keys
    ]
    monkeypatch.setattr(s3, "_uploads", lambda *_: (None, found))
    command = ("s3", "list-uploads", "s3://bucket")
    (uncut, _), (shown, _) = (printed(*command, columns=one) for one in (None, 80))
    check_fits(shown, uncut)
