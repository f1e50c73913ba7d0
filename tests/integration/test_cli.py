"""Every verb as a user calls it, and the handling of invalid input."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.captured import captured
from support.cli import app
from support.preloaded import run_preloaded
from typer.main import get_command

from iobench import workloads
from iobench.cli import s3
from iobench.errors import DataMismatchError, RegressionError, UnavailableError, UsageError
from iobench.results import read
from iobench.units import MIB
from iobench.writers.s3_store.objects import UnfinishedUpload
from iobench.writers.s3_store.target import S3Target

Command = Callable[..., "subprocess.CompletedProcess[str]"]

DOCS = Path(__file__).parents[2] / "docs/cli.md"
EXAMPLE = Path(__file__).parents[1] / "unit/results/example.jsonl"
_BY_HAND = ("plan", "--nodes", "8", "--save", "30s", "--restore", "1min")


def check(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """It failed with `code`, without a report, and with one line on stderr that has all `words`."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not _PLAN.match(line)]
    assert len(lines) == 1, done.stderr
    assert re.match(r"iobench( \w+)?: ", lines[0])
    for word in words:
        assert word in lines[0]


_PLAN = re.compile(r"(workload|scaled|files|writers|target|run) +|\d+ \w+ (save|restore): ")
"""What a run says before it fails: its plan, and results so far."""


@pytest.fixture
def refused(iobench_inside, here, tiny_path, target, tmp_path) -> Command:
    """Run `iobench run`, which must fail without changing target, results or the current
    directory."""

    def call(code: int, *arguments: str | Path, words: tuple[str, ...] = ()) -> str:
        options = {"-w": tiny_path, "--target": target, "-o": tmp_path / "run.jsonl"}
        given = [str(argument) for argument in arguments]
        defaults = [part for pair in options.items() if pair[0] not in given for part in pair]
        done = iobench_inside("run", "--size", "full", "--no-fio", *defaults, *arguments)
        check(done, code, *words)
        assert os.listdir(target) == os.listdir(here) == []
        assert not (tmp_path / "run.jsonl").exists()
        return done.stderr

    return call


def test_uploads_of_any_age() -> None:
    """`--older-than` spares younger uploads, also where no calendar goes so far back."""
    began = datetime.now(UTC) - timedelta(hours=2)
    place = S3Target(bucket="bucket", key="key")
    upload = UnfinishedUpload(target=place, upload_id="1", initiated=began)
    found = {hours: s3._older([upload], 3600 * hours) for hours in (0, 1, 24, 1e15)}
    assert found == {0: [upload], 1: [upload], 24: [], 1e15: []}


# The answer of every verb.


@pytest.mark.parametrize("arguments", [(), ("workloads",)])
def test_no_arguments_give_help(iobench_inside, arguments: tuple[str, ...]) -> None:
    """Without a verb the help is printed, with the exit code of a usage error."""
    done = iobench_inside(*arguments)
    assert done.returncode == 2
    assert ("Commands:" if arguments else "Measure:") in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/mnt/x"), 1, "No space left on device"),
        (MemoryError(), 1, "out of memory; end other programs, or work on less data"),
        (UsageError("two\nlines"), 2, "two lines"),
        (UnavailableError("uring", "no ring.", "Use threads."), 3, "no ring"),
        (DataMismatchError("other bytes"), 4, "other bytes"),
        (RegressionError("slower"), 5, "slower"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, BaseException) else "",
)
def test_an_error_is_one_line_and_a_code(iobench_inside, monkeypatch, error, code, says) -> None:
    """Every exception of a verb gives the documented exit code, and no traceback."""

    def app(**how: object) -> None:
        raise error

    monkeypatch.setattr("iobench.cli.main.app_of", lambda _: app)
    done = iobench_inside("run")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("iobench: " if code == 130 else "iobench run: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_while_modules_are_loaded(tmp_path) -> None:
    """Before the command has begun: one line and the exit code, no traceback."""
    (tmp_path / "typer.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    done = captured(
        [sys.executable, "-m", "iobench", "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "iobench: interrupted\n"


def test_completion() -> None:
    """What a shell asks for after `iobench --install-completion`."""
    asked = {"_IOBENCH_COMPLETE": "complete_bash", "COMP_WORDS": "iobench work", "COMP_CWORD": "1"}
    done = captured([sys.executable, "-m", "iobench"], check=True, env={**os.environ, **asked})
    assert done.stdout.split() == ["workloads"]


def test_version(iobench) -> None:
    """`--version` prints name and version."""
    import iobench as package

    assert iobench("--version").stdout == f"iobench {package.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["writers"]])
def test_what_answers_at_once_imports_nothing_heavy(arguments: list[str], tmp_path) -> None:
    """Help and the list of writers import neither torch nor pandas nor anything that needs
    numpy."""
    code = (
        "import sys, contextlib, io\n"
        f"sys.argv = ['iobench', *{arguments!r}]\n"
        "from iobench.cli.main import run\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    run()\n"
        "print(*({'torch', 'pandas', 'boto3', 'plotly'} & {*sys.modules}))\n"
    )
    done = captured([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert done.stdout.split() == []


def test_workloads_list(iobench_inside) -> None:
    """The table has every named workload, with its bytes."""
    table = iobench_inside("workloads", "list").stdout
    assert [line.split()[0] for line in table.splitlines()[4:]] == workloads.names()
    assert re.search(r"^llama7b .* 75\.31 GiB ", table, re.MULTILINE)


def test_workloads_show(iobench_inside, tiny_path) -> None:
    """Facts, files and tensors of a rank; text and document agree."""
    facts = iobench_inside("workloads", "show", "llama7b").stdout
    assert re.search("step time +3.87 s on 8 H100", facts)
    assert "model.safetensors" not in facts
    files = iobench_inside("workloads", "show", tiny_path, "--rank", "1", "--files").stdout
    assert "rng_state_1.pth" in files
    done = iobench_inside("workloads", "show", tiny_path, "--files", "--format", "json")
    document = json.loads(done.stdout)
    assert document["schema"] == "iobench.workload/1"
    assert sum(file["bytes"] for file in document["files"]) == document["rank_bytes"]
    weights = next(file for file in document["files"] if file["path"] == "model.safetensors")
    assert len(weights["tensors"]) == weights["tensor_count"] > 10
    assert "model.layers.1.mlp.up_proj.weight" in [one["name"] for one in weights["tensors"]]
    plain = json.loads(iobench_inside("workloads", "show", tiny_path, "--format", "json").stdout)
    assert plain["files"] is None


def test_writers(iobench_inside, target) -> None:
    """Every writer with its options and whether it works there, as text and as a document."""
    document = json.loads(iobench_inside("writers", "--target", target, "--format", "json").stdout)
    listed = {one["name"]: one for one in document["writers"]}
    assert {"null", "buffered", "uncached", "odirect"} <= set(listed)
    assert listed["buffered"]["available"]
    options = {option["name"]: option for option in listed["odirect"]["options"]}
    assert options["block_size"]["unit"] == "bytes"
    assert options["threads"]["low"] == 1
    peers = {one["name"]: one for one in document["peers"]}
    assert peers["peer:torch-save"]["available"]
    assert not peers["peer:obstore"]["available"]
    assert "s3://bucket/prefix" in peers["peer:obstore"]["reason"]
    table = iobench_inside("writers", "--target", target).stdout
    assert re.search(r"^buffered +yes ", table, re.MULTILINE)
    assert re.search(r"^peer:dcp +yes ", table, re.MULTILINE)
    assert os.listdir(target) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("workloads", "list"),
        ("workloads", "show", "llama7b", "--files", "--format", "json"),
        ("writers",),
        ("show", EXAMPLE, "--format", "json"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_pipe_without_a_reader(tmp_path, arguments: tuple[str | Path, ...]) -> None:
    """`| head -0` ends it without a message, however long the output is."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run_preloaded(["-m", "iobench", *arguments], stdout=writing, cwd=tmp_path)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


_CLOSED = """
import os, sys
number, name = int(sys.argv.pop(1)), sys.argv.pop(1)
os.close(number)
setattr(sys, name, None)  # as Python does at its start
from iobench.cli.main import run
run()
"""


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr", "all"])
def test_a_closed_stream_is_no_file_of_the_run(tiny_path, target, tmp_path, closed) -> None:
    """Otherwise the next opened file would get its number, and output would go there."""
    arguments = ("run", tiny_path, "--target", target, "--no-fio", "--repeat", "1")
    arguments += ("--writer", "buffered", "--size", "full", "-o", tmp_path / "run.jsonl")
    if closed == "all":  # by the shell, before Python starts
        command = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "iobench")
        done = captured([*command, *arguments], cwd=tmp_path, timeout=60)
    else:
        number = ["stdin", "stdout", "stderr"].index(closed)
        done = run_preloaded(["-c", _CLOSED, number, closed, *arguments], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("Save:" in done.stdout) == (closed in ("stdin", "stderr"))
    assert read(tmp_path / "run.jsonl").incomplete is None


def in_terminal(arguments: list[str | Path], cwd: Path, **environment: str) -> str:
    """Return what the command prints if stdout and stderr are a terminal."""
    leader, terminal = os.openpty()
    output: list[bytes] = []
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}

    def collect() -> None:
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while part := os.read(leader, 65536):
                output.append(part)

    reader = threading.Thread(target=collect)
    reader.start()
    try:
        done = run_preloaded(
            ["-m", "iobench", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
            cwd=cwd,
            env={**plain, "TERM": "xterm", "COLUMNS": "100", **environment},
            timeout=60,
        )
        assert done.returncode == 0
    finally:
        os.close(terminal)
        reader.join()
        os.close(leader)
    return b"".join(output).decode()


def test_a_run_in_a_terminal(tiny_path, target, tmp_path) -> None:
    """A terminal shows a bar in place of lines, the report, and its cursor again."""
    text = in_terminal(
        [
            *("run", "-w", tiny_path, "--target", target, "--no-fio", "--repeat", "1"),
            *("--writer", "buffered", "--size", "full", "-o", tmp_path / "run.jsonl"),
            "-v",
        ],
        tmp_path,
    )
    assert "1 buffered save: " not in text
    assert text.startswith("reading the workload and trying the writers ...\r\x1b[K")
    order = ["\x1b[?25l", " left ", "1/1 buffered restore", "\x1b[?25h", "Save:", "tiny, rank 0: "]
    assert [part for part in order if part not in text] == [], text
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)
    assert re.search(r"buffered +save .*\bopen ", text)
    assert read(tmp_path / "run.jsonl").incomplete is None


# Input that cannot be meant.


@pytest.mark.parametrize(
    "verb", ["run", "autotune", "train", "doctor", "writers", "reproduce async"]
)
def test_a_target_that_is_no_directory(iobench_inside, tmp_path, verb: str) -> None:
    """Every verb refuses it with the same words, and what to do."""
    (tmp_path / "file").touch()
    for name, words in {
        "missing": "no such directory; make it first",
        "file": "is not a directory; name one",
        "file/below": "cannot be reached (Not a directory)",
    }.items():
        done = iobench_inside(*verb.split(), "--target", tmp_path / name)
        check(done, 2, f"iobench {verb.split()[0]}: --target {tmp_path / name}: {words}")


@pytest.mark.parametrize("verb", ["rnu", "workload\x1b[2J"])
def test_an_unknown_verb(iobench_inside, verb: str) -> None:
    """One line that names it and the help, without control characters."""
    shown = verb.replace("\x1b", r"\x1b")
    check(iobench_inside(verb), 2, f"No such command '{shown}'", "--help")


@pytest.mark.parametrize("value", ["abc", "9" * 5000], ids=["word", "5000 digits"])
@pytest.mark.parametrize(
    ("command", "options"),
    [
        (("run",), ("--size", "--repeat", "--numjobs")),
        (("autotune",), ("--size", "--max-time", "--max-bytes", "--max-memory")),
        (_BY_HAND, ("--save", "--restore", "--restart", "--step", "--interval", "--blocking")),
        (("plan", "--nodes", "8", "--results", EXAMPLE), ("--size",)),
        (("train",), ("--size", "--every")),
        (("reproduce", "async"), ("--size",)),
        (("compare", EXAMPLE, EXAMPLE), ("--threshold",)),
        (("s3", "list-uploads", "s3://bucket"), ("--older-than",)),
    ],
    ids=lambda value: None if "--" in value[0] else " ".join(map(str, value[:3]))[:20],
)
def test_a_value_of_no_meaning_names_its_option(iobench_inside, command, options, value) -> None:
    """The option, the value (its beginning, if it is long), and what to write."""
    for option in options:
        done = iobench_inside(*command, option, value)
        check(done, 2, f"iobench {command[0]}: {option}", value[:20])
        assert len(done.stderr) < 250


@pytest.mark.root
def test_a_file_system_that_is_read_only(
    iobench_inside, refused, new_filesystem, target, tmp_path
) -> None:
    """As working directory it is refused before any measurement, with the option for another
    place; as target like a directory that cannot be written."""
    place = new_filesystem("tmpfs", MIB)
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    cases: tuple[tuple[tuple[str | Path, ...], str], ...] = (
        (("run",), f"{place.name} is not writable; give -o FILE"),
        (("train",), f"{place.name} is not writable; give -o FILE"),
        (("autotune",), "-o writer.toml: "),
        (("autotune", "-o", tmp_path / "w.toml"), "is not writable; give --journal FILE"),
        (("autotune", "-o", tmp_path / "w", "--journal", tmp_path / "no/x"), "there is no dir"),
        (("reproduce", "async"), "run it where results/ can be created"),
    )
    for arguments, words in cases:
        check(iobench_inside(*arguments, "--target", target, cwd=place), 2, words)
    assert os.listdir(target) == []
    refused(2, "--target", place, words=("cannot be written",))


def test_a_run_without_arguments(iobench_inside, target) -> None:
    """The workload llama7b, by the default writers, in this directory, also without results/."""
    done = iobench_inside("run", "--dry-run", "--size", "700MiB", "--no-fio", cwd=target)
    assert done.returncode == 0
    assert "workload  llama7b, rank 0" in done.stderr
    assert "writers   buffered, odirect, hybrid" in done.stderr
    assert f"target    {target.resolve()}" in done.stderr


def test_a_quiet_run(iobench_inside, tiny_path, target, tmp_path) -> None:
    """The workload is given by position; stderr only has the path of the record."""
    record = tmp_path / "run.jsonl"
    done = iobench_inside(
        *("run", tiny_path, "-q", "--target", target, "--no-fio", "--repeat", "1"),
        *("--writer", "buffered", "--size", "full", "-o", record),
    )
    assert (done.returncode, done.stderr) == (0, f"record: {record}\n")
    assert done.stdout.startswith("Save:    buffered at ")


# Targets that cannot be used.


@pytest.mark.root
def test_a_file_system_without_direct_io(refused, new_filesystem) -> None:
    """If O_DIRECT is refused, the exit code is 3, with the reason and an alternative."""
    place = new_filesystem("ramfs")
    words = ("refuses O_DIRECT", "Use --writer uncached or buffered")
    refused(3, "--target", place, "--writer", "buffered,odirect", words=words)
    assert os.listdir(place) == []


# docs/cli.md.


def _described(command: Any, path: str) -> Iterator[tuple[str, str]]:
    """Return (`iobench run`, its section of the reference) for each command below `command`."""
    yield path, _section(command, path)
    for name, below in getattr(command, "commands", {}).items():
        yield from _described(below, f"{path} {name}")


def _section(command: Any, path: str) -> str:
    about = " ".join(command.help.split("\n\n")[0].split())
    rows = [
        f"| {_names(parameter)} | {_default(parameter)} | {parameter.help} |"
        for parameter in command.params
        if not getattr(parameter, "hidden", False)
    ]
    table = ["", "| option | default | meaning |", "|---|---|---|", *rows] if rows else []
    return "\n".join([f"## `{path}`", "", about, *table])


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        word = parameter.show_default
        return f"`{word}`" if "<" in word else word
    if parameter.default in (None, ""):
        return ""
    if isinstance(parameter.default, bool):
        names = parameter.opts if parameter.default else parameter.secondary_opts
        return f"`{names[0]}`" if names else ""
    return f"`{parameter.default}`"


def test_the_reference_is_the_help() -> None:
    """docs/cli.md has every verb with every option, default and sentence of the help, and no
    more."""
    text = DOCS.read_text()
    sections = dict(_described(get_command(app), "iobench"))
    for path, section in sections.items():
        assert section in text, f"docs/cli.md should have, for {path}:\n\n{section}\n"
    assert re.findall(r"^## `(iobench.*)`$", text, re.MULTILINE) == list(sections)
    rows = sum(section.count("\n| `") for section in sections.values())
    assert len(re.findall(r"^\| `(?:-|[A-Z]+`)", text, re.MULTILINE)) == rows
