"""`iobench show` prints a report from a record, and warns about an incomplete run."""

import json
import unicodedata
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from iobench.errors import UsageError

_KEPT = ("schema", "kind", "run_id", "operation", "status", "cold", "started_at", "finished_at")
"""What the reader checks, or takes for something else than text."""


def test_the_table_is_the_default(app: typer.Typer, example_path: Path) -> None:
    answer = CliRunner().invoke(app, [str(example_path)])
    assert answer.exit_code == 0
    assert answer.stdout.startswith("Save:    3 samples cannot name a winner")
    assert "gather 0.125" not in answer.stdout
    assert answer.stderr == ""
    detailed = CliRunner().invoke(app, [str(example_path), "-v"]).stdout
    assert "gather 0.125" in detailed
    refused = CliRunner().invoke(app, [str(example_path), "-v", "--format", "json"])
    assert isinstance(refused.exception, UsageError)


def test_json_alone_is_on_stdout(app: typer.Typer, example_path: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed.jsonl"
    killed.write_bytes(b"".join(example_path.read_bytes().splitlines(keepends=True)[:-1]))
    answer = CliRunner().invoke(app, [str(killed), "--format", "json"])
    assert json.loads(answer.stdout)["schema"] == "iobench.report/1"
    assert answer.stderr == (
        f"warning: {killed} has no end: the run was killed or is still running; "
        "12 samples were recorded\n"
    )


@pytest.mark.parametrize("form", ["table", "json", "csv", "md"])
@pytest.mark.parametrize("killed", [True, False])
def test_a_foreign_record_commands_no_terminal(
    app: typer.Typer, example_path: Path, tmp_path: Path, form: str, killed: bool
) -> None:
    """Control characters in its texts and keys are escaped."""

    def hostile(value: object) -> object:
        if isinstance(value, dict):
            return {name: value[name] if name in _KEPT else hostile(value[name]) for name in value}
        if isinstance(value, list):
            return [hostile(one) for one in value]
        return f"{value}\x1b[2J\x9b\u202e\x7f\ud800\n" if isinstance(value, str) else value

    lines = [json.loads(line) for line in example_path.read_bytes().splitlines()]
    path = tmp_path / "run\x1b[31m.jsonl"
    path.write_text(
        "\n".join(json.dumps(hostile(line)) for line in lines[: -1 if killed else None])
    )
    answer = CliRunner().invoke(app, [str(path), "--format", form])
    assert answer.exit_code == 0, answer.exception
    assert answer.stderr.startswith("warning" if killed else "")
    assert r"\x1b[2J" in answer.stdout.replace("\\\\", "\\")
    shown = (answer.stdout + answer.stderr).replace("\n", "")
    assert not {unicodedata.category(one) for one in shown} & {"Cc", "Cf", "Cs"}
