"""`iobench report`: what it refuses before it works, and what it writes."""

from __future__ import annotations

import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from iobench.cli.report import report
from iobench.cli.stopped import report_stopped
from iobench.errors import IobenchError, UnavailableError, UnknownNameError, UsageError
from iobench.report.page import kinds
from iobench.results import ResultFile


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(report)
    return app


def _error(app: typer.Typer, *arguments: str | Path) -> str:
    answer = CliRunner().invoke(app, [str(one) for one in arguments])
    assert isinstance(answer.exception, IobenchError), answer.output
    return str(answer.exception)


@pytest.mark.slow
def test_a_page_and_a_picture(app: typer.Typer, example_path: Path, tmp_path: Path) -> None:
    """An older page is replaced; nothing else is left."""
    page, picture = tmp_path / "a.html", tmp_path / "a.svg"
    for _ in range(2):
        arguments = [example_path, "-o", page, "--figure", picture, "--chart", "phases-save"]
        answer = CliRunner().invoke(app, [str(one) for one in arguments])
        assert answer.exit_code == 0, answer.output
        assert answer.stderr == f"figure: {picture}\nreport: {page}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert "Where the time of each save goes" in picture.read_text()
    assert sorted(tmp_path.iterdir()) == [page, picture]


def test_what_cannot_be_written_is_refused_first(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the record is read, which does not even exist here."""
    record, other = tmp_path / "none.jsonl", tmp_path / "mine.html"
    other.write_text("<p>mine")
    (tmp_path / "dir.html").mkdir()
    assert "nothing to write" in _error(app, record)
    assert "--chart chooses" in _error(app, record, "-o", "a.html", "--chart", "x")
    assert "must end with .html" in _error(app, record, "-o", record)
    assert "must end with .svg or .png" in _error(app, record, "--figure", "a.gif")
    assert "there is no directory" in _error(app, record, "-o", tmp_path / "no" / "a.html")
    assert "is not a report" in _error(app, record, "-o", other)
    assert "is a directory" in _error(app, record, "-o", tmp_path / "dir.html")
    assert "no such file" in _error(app, record, "-o", tmp_path / "a.html")
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    assert "is not writable" in _error(app, record, "-o", tmp_path / "a.html")
    assert other.read_text() == "<p>mine"


def test_unknown_charts_list_the_known(
    app: typer.Typer, example_path: Path, tmp_path: Path
) -> None:
    wanted = ["--figure", tmp_path / "a.png", "--chart", "rate-saves"]
    message = _error(app, example_path, *wanted)
    assert "unknown chart 'rate-saves'; did you mean 'rate-save'?" in message
    assert issubclass(UnknownNameError, UsageError)


def test_without_the_extra(
    app: typer.Typer, example_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, which installs it."""
    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "altair" else find(name))
    message = _error(app, example_path, "-o", "a.html")
    assert message.endswith("altair is not installed. Type: pip install 'iobench[report]'.")
    assert issubclass(UnavailableError, IobenchError)


def test_kinds_are_not_mixed(example_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each report is of one kind of record."""
    odd = kinds.RecordKind(reads=lambda path: path if path.suffix == ".odd" else None, page="x:y")
    monkeypatch.setattr(kinds, "KINDS", {"odd": odd, **kinds.KINDS})
    with pytest.raises(UsageError, match=r"is of odd, .* is of iobench run; make one report"):
        kinds.page_of(["a.odd", example_path])


def test_a_run_imports_no_charts() -> None:
    """Neither does the command line, nor the table in the terminal."""
    code = (
        "import sys, iobench.cli.main, iobench.report.table, iobench.report.summary;"
        "print(*{'altair', 'jinja2', 'vl_convert'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_page_of_what_stopped(
    recorded: ResultFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what was measured; no page, and one line at most, where there is nothing or it fails."""
    lines = recorded.path.read_text().splitlines(keepends=True)
    record, page = tmp_path / "record.jsonl", tmp_path / "page.html"
    for kept, said in (
        (None, ""),
        (1, "no report: nothing was measured yet"),
        (20, f"report: {page}"),
    ):
        if kept is not None:
            record.write_text("".join(lines[:kept]))
        report_stopped(record, page)
        assert capsys.readouterr().err.strip() == said
        assert page.exists() == said.startswith("report: ")
    report_stopped(record, None)
    report_stopped(record, tmp_path / "gone" / "a.html")
    assert capsys.readouterr().err.startswith("warning: no report: --report ")
    record.write_text("no record")
    report_stopped(record, page)
    assert capsys.readouterr().err.startswith("warning: no report: ")
