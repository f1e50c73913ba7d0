"""app_of: a command line of one verb, which is the same as that of all verbs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from support.cli import app
from typer.main import get_command
from typer.testing import CliRunner

from iobench.cli.verbs import app_of


def commands(app: typer.Typer) -> dict[str, Any]:
    group: Any = get_command(app)
    return dict(group.commands)


_ALL = commands(app)


@pytest.mark.parametrize("verb", sorted(_ALL))
def test_a_verb_alone_is_the_same_command(verb: str) -> None:
    """It has the same parameters, subcommands and kind of command."""
    alone = commands(app_of(verb))
    assert list(alone) == [verb]
    one, same = alone[verb], _ALL[verb]
    assert [type(one), one.help, one.context_settings] == [
        type(same),
        same.help,
        same.context_settings,
    ]
    assert [repr(parameter) for parameter in one.params] == [repr(each) for each in same.params]
    assert [*getattr(one, "commands", ())] == [*getattr(same, "commands", ())]


@pytest.mark.parametrize("word", [None, "rnu", "--help", "--version", "_exec", "app"])
def test_other_words_have_all_verbs(word: str | None) -> None:
    """The parser then says what is wrong, or prints the list."""
    assert list(commands(app_of(word))) == list(_ALL)


def test_a_verb_loads_no_other_one() -> None:
    code = (
        "import sys; sys.argv = ['iobench', 'exec', '--help']\n"
        "from iobench.cli.main import run\n"
        "try: run()\n"
        "except SystemExit: pass\n"
        "print(*sorted(name for name in sys.modules if name.startswith('iobench.cli.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = done.stdout.splitlines()[-1].split()
    loaded = {name.removeprefix("iobench.cli.") for name in names}
    assert loaded & set(_ALL) == {"exec"}


def _every_command(group: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    found = {}
    for name, command in group.items():
        inside = getattr(command, "commands", None)
        if inside is None:
            found[" ".join((*path, name))] = command
        else:
            found |= _every_command(inside, (*path, name))
    return found


def test_there_are_few_options() -> None:
    """Each new one needs a user; a value of another option may say the same."""
    commands: list[Any] = [get_command(app), *_every_command(_ALL).values()]
    shown = [one for command in commands for one in command.params if not one.hidden]
    assert len([one for one in shown if one.param_type_name == "option"]) <= 120


@pytest.mark.parametrize("verb", sorted(_every_command(_ALL)))
def test_help_has_words_for_values(verb: str) -> None:
    """`--size SIZE`, and no name of a type of Python."""
    done = CliRunner().invoke(app, [*verb.split(), "--help"])
    assert done.exit_code == 0
    assert not re.findall(r"<(?:str|int|float|path|list|bool)\b|\b(?:TEXT|INTEGER)\b", done.output)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("run --writer odirect --writer uring", 2),
        ("run --numjobs 1 --numjobs 2", 2),
        ("plan --nodes 4 --nodes 8 --save 1s --restore 1s", 2),
        ("train --mode sync --mode async", 2),
        ("writers --target /tmp --target /", 0),
        ("plan --nodes 4 --save 1s --save 2s --restore 1s", 0),  # the last one counts, as anywhere
        ("exec --config odirect -- echo --config b", 0),
    ],
)
def test_a_list_that_is_given_twice(line: str, code: int, iobench_inside: Any) -> None:
    """The first value would have no effect, without a word. Several targets may be given, one
    value, to change that of a script, and words of the command of exec."""
    done = iobench_inside(*line.split())
    assert done.returncode == code, done.stderr
    assert ("is given 2 times; give one, with commas" in " ".join(done.stderr.split())) == (
        code == 2
    )


@pytest.mark.slow
def test_report_is_show_as_html(tmp_path: Path) -> None:
    """The other name of `show -o FILE.html` writes the same bytes."""
    record = str(next((Path(__file__).parents[2] / "results").glob("reference-*.jsonl")))
    pages = []
    for verb in ("show", "report"):
        page = tmp_path / f"{verb}.html"
        done = CliRunner().invoke(app, [verb, record, "-o", str(page)])
        assert done.exit_code == 0, done.output
        pages.append(page.read_bytes())
    assert pages[0] == pages[1]
