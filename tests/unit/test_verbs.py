"""app_of: a command line of one verb, which is the same as that of all verbs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer
from support.cli import app
from typer.main import get_command

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
