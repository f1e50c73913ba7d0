"""A terminal, and the command that shows a record."""

import pytest
import typer
from support.terminal import Terminal

from iobench.cli.given import declare
from iobench.cli.show import show


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 80 columns without colours."""
    for name, value in (("COLUMNS", "80"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    return Terminal()


@pytest.fixture
def app() -> typer.Typer:
    """The command `iobench show`."""
    app = typer.Typer()
    app.command(help=declare(show))(show)
    return app
