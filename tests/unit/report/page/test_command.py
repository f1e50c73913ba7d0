"""`iobench show` and `report`: what they refuse before they work, and what they write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from iobench.cli.pages import Shown
from iobench.errors import IobenchError
from iobench.results import ResultFile

_RESULTS = Path(__file__).parents[4] / "results"


def _error(app: typer.Typer, *arguments: str | Path) -> str:
    answer = CliRunner().invoke(app, [str(one) for one in arguments])
    assert isinstance(answer.exception, IobenchError), answer.output
    return str(answer.exception)


@pytest.mark.slow
def test_a_page_and_a_picture(app: typer.Typer, example_path: Path, tmp_path: Path) -> None:
    """An older page is replaced; nothing else is left."""
    page, picture = tmp_path / "a.html", tmp_path / "a.svg"
    for _ in range(2):
        for file, said, more in (
            (page, "report", []),
            (picture, "picture", ["--chart", "in-order-save"]),
        ):
            answer = CliRunner().invoke(app, [str(example_path), "-o", str(file), *more])
            assert answer.exit_code == 0, answer.output
            assert answer.stderr == f"{said}: {file}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert "Each save in the order in which they ran" in picture.read_text()
    assert sorted(tmp_path.iterdir()) == [page, picture]


def test_what_cannot_be_written_is_refused_first(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the record is read, which does not even exist here."""
    record, other = tmp_path / "none.jsonl", tmp_path / "mine.html"
    other.write_text("<p>mine")
    (tmp_path / "dir.html").mkdir()
    assert "give -o FILE.html" in _error(app, record, "--format", "html")
    assert "--chart chooses" in _error(app, record, "-o", "a.html", "--chart", "x")
    assert "must end with .html" in _error(app, record, "-o", record, "--format", "html")
    assert "must end with .svg" in _error(app, record, "-o", "a.gif", "--format", "svg")
    assert "shows one record" in _error(app, record, record)
    assert "there is no directory" in _error(app, record, "-o", tmp_path / "no" / "a.html")
    assert "is not a report" in _error(app, record, "-o", other)
    assert "is a directory" in _error(app, record, "-o", tmp_path / "dir.html")
    assert "no such file" in _error(app, record, "-o", tmp_path / "a.html")
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    assert "is not writable" in _error(app, record, "-o", tmp_path / "a.html")
    assert other.read_text() == "<p>mine"


@pytest.mark.parametrize("form", ["table", "json", "md"])
@pytest.mark.parametrize("name", ["autotune-llama7b", "train-gpt5b-nemo", "llama7b"])
def test_every_kind_is_shown_as_text(
    app: typer.Typer, name: str, form: str, tmp_path: Path
) -> None:
    """On stdout and in a file, which is not replaced."""
    record, file = _RESULTS / f"reference-{name}.jsonl", tmp_path / "shown"
    answer = CliRunner().invoke(app, [str(record), "--format", form])
    assert (answer.exit_code, answer.stderr) == (0, ""), answer.output
    assert {"json": '"schema": "iobench.', "md": "**"}.get(form, "─") in answer.stdout
    into = [record, "--format", form, "-o", file]
    assert CliRunner().invoke(app, [str(one) for one in into]).exit_code == 0
    assert file.read_text() == answer.stdout
    assert "exists" in _error(app, *into)


def test_a_journal_without_an_answer_is_the_race_so_far(app: typer.Typer, tmp_path: Path) -> None:
    """Every setting with its rounds and its median, and how to go on."""
    lines = (_RESULTS / "reference-autotune-llama7b.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(one for one in lines[:200] if '"confirm"' not in one))
    shown = CliRunner().invoke(app, [str(path)])
    assert shown.exit_code == 0, shown.output
    assert f"iobench autotune --resume {path}" in shown.stdout.replace("\n", " ")
    assert "hybrid 20 1.80 -" in " ".join(shown.stdout.split())
    document = json.loads(CliRunner().invoke(app, [str(path), "--format", "json"]).stdout)
    assert document["chosen"] is None
    assert {one["setting"] for one in document["tried"]} >= {"odirect", "buffered"}
    assert "leave out -v" in _error(app, path, "-v")


def test_what_stopped_is_shown(
    recorded: ResultFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of what was measured; nothing where nothing was, or where it cannot be read."""
    lines = recorded.path.read_text().splitlines(keepends=True)
    record = tmp_path / "record.jsonl"
    for kept, said in ((None, ""), (1, ""), (20, f"record: {record}")):
        if kept is not None:
            record.write_text("".join(lines[:kept]))
        _stop(record)
        shown = capsys.readouterr()
        assert shown.err.strip() == said
        assert ("GiB/s" in shown.out) == bool(said)
    record.write_text("no record")
    _stop(record)
    assert capsys.readouterr() == ("", "")


def _stop(record: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Shown(form="table").stopped(record):
        raise KeyboardInterrupt
