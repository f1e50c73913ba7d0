"""The `iobench` command: its verbs, and what becomes of an error."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import typer

from iobench import __version__
from iobench.cli.doctor import doctor
from iobench.cli.run import run as run_command
from iobench.cli.show import show
from iobench.cli.workloads import app as workloads_app
from iobench.cli.writers import writers
from iobench.errors import IobenchError

__all__ = ["app", "run"]

_INTERRUPTED = 130

app = typer.Typer(
    name="iobench",
    epilog="Start with: iobench doctor, then iobench run --workload llama7b. Exit codes: 0 done, "
    "1 failed, 2 usage, 3 writer unavailable here, 4 data differ, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run")(run_command)
app.add_typer(workloads_app, name="workloads")
app.command()(writers)
app.command()(doctor)
app.command()(show)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"iobench {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_version, is_eager=True
    ),
) -> None:
    """Measure how fast checkpoints are saved and restored here, and by which I/O path."""


def _terminate(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise KeyboardInterrupt


def run() -> None:
    """Run the command line; errors become one line on stderr and their exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        print("iobench: interrupted; temporary files are removed", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except IobenchError as error:
        print(f"iobench: {_one_line(error)}", file=sys.stderr)
        sys.exit(error.exit_code)


def _one_line(error: IobenchError) -> str:
    return " ".join(str(error).split())
