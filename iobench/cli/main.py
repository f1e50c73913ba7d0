"""The `iobench` command: its verbs and its error messages."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

import typer

from iobench._version import __version__
from iobench.cli import interrupts
from iobench.cli.agent import app as agent_app
from iobench.cli.autotune import autotune
from iobench.cli.compare import CompareCommand, compare
from iobench.cli.doctor import doctor
from iobench.cli.exec import exec_
from iobench.cli.given import GroupedCommand
from iobench.cli.launched import one_process, told_by_rank_0
from iobench.cli.offload import app as offload_app
from iobench.cli.plan import plan
from iobench.cli.report import report
from iobench.cli.reproduce import reproduce
from iobench.cli.results import app as results_app
from iobench.cli.run import run as run_command
from iobench.cli.s3 import app as s3_app
from iobench.cli.servers import print_plan
from iobench.cli.show import show
from iobench.cli.tiers import app as tiers_app
from iobench.cli.train import train
from iobench.cli.workloads import app as workloads_app
from iobench.cli.writers import writers
from iobench.errors import IobenchError
from iobench.text import printable

__all__ = ["app", "run"]

_INTERRUPTED = 130
_ONE_PROCESS = ("autotune", "plan", "reproduce", "train")
"""Verbs that measure, or think, in one process: several ranks would do the same work at once."""
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]
"""The error that typer raises for a command line that it cannot parse. It has no public name."""

app = typer.Typer(
    name="iobench",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: iobench doctor, then iobench run. Exit codes: 0 done, "
    "1 failed, 2 usage, 3 writer unavailable here, 4 data differ, 5 slower than before, "
    "130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run", cls=GroupedCommand)(run_command)
app.command()(autotune)
app.add_typer(workloads_app, name="workloads")
app.command()(writers)
app.command()(doctor)
app.command()(show)
app.command()(report)
app.command()(train)
app.command()(plan)
app.command()(reproduce)
app.command(cls=CompareCommand)(compare)
app.command(
    "exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)(exec_)
app.add_typer(results_app, name="results")
app.add_typer(s3_app, name="s3")
app.add_typer(agent_app, name="agent")
app.add_typer(offload_app, name="offload")
app.add_typer(tiers_app, name="tiers")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"iobench {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    ctx: typer.Context,
    _shown: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_version, is_eager=True
    ),
) -> None:
    """Measure how fast checkpoints are saved and restored here, and by which I/O path."""
    if ctx.invoked_subcommand in _ONE_PROCESS:
        one_process(ctx.invoked_subcommand)


def run() -> None:
    """Run the command line. An error becomes one line on stderr and its exit code."""
    _open_closed_streams()
    ends_the_run = interrupts.once()
    # If SIGCHLD is ignored, the kernel keeps no exit code of fio, a job or the script of exec.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        told_by_rank_0(app, _CommandLineError)
        code = app(prog_name="iobench", standalone_mode=False)
        sys.stdout.flush()  # here: a pipe without a reader gives no traceback
        if code == _INTERRUPTED:  # typer's exit code for a KeyboardInterrupt
            raise KeyboardInterrupt
    except (KeyboardInterrupt, typer.Abort):
        interrupts.ignore(ends_the_run)
        _fail("interrupted; temporary files are removed", _INTERRUPTED)
    except _CommandLineError as error:
        _usage(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except IobenchError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(str(error), IobenchError.exit_code)
    except MemoryError:
        _fail("out of memory; choose a smaller --pool or --size", IobenchError.exit_code)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr.

    The kernel gives the lowest free number to the next file, so a checkpoint could become stdout.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 -- for good


def _usage(error: Any) -> NoReturn:
    """Report a command line that cannot be parsed; print the help for an empty one."""
    message = error.format_message().replace("Value error, ", "")  # pydantic's word
    if message.startswith("Usage:"):
        error.show()
        sys.exit(error.exit_code)
    command = f"{error.ctx.command_path} --help" if error.ctx else "iobench --help"
    _fail(f"{message.rstrip('.')}; see {command}", error.exit_code)


def _fail(message: str, code: int) -> NoReturn:
    print_plan([f"iobench: {printable(' '.join(message.split()))}"], indent=" " * len("iobench: "))
    sys.exit(code)
