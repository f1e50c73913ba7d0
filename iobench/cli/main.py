"""The `iobench` command: runs a verb, and reports its errors."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import Any, NoReturn

import typer

from iobench.cli import interrupts
from iobench.cli.given import print_plan
from iobench.cli.launched import is_other_rank
from iobench.cli.verbs import VERBS, app_of
from iobench.errors import IobenchError
from iobench.text import printable

_INTERRUPTED = 130
_HELP = ("-h", "--help", "--version")
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]
"""The error that typer raises for a command line that it cannot parse. It has no public name."""


def run() -> None:
    """Run the command line. An error becomes one line on stderr and its exit code."""
    _open_closed_streams()
    ends_the_run = interrupts.once()
    # If SIGCHLD is ignored, the kernel keeps no exit code of fio, a job or the script of exec.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        verb, *words = (*sys.argv[1:], "")
        if verb != "exec" and {*_HELP} & {verb, *words} and is_other_rank():
            sys.exit(0)
        code = app_of(verb or None)(prog_name="iobench", standalone_mode=False)
        sys.stdout.flush()  # here: a pipe without a reader gives no traceback
        interrupts.ignore(ends_the_run)
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
        _fail("out of memory; end other programs, or work on less data", IobenchError.exit_code)
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
    if is_other_rank():
        sys.exit(error.exit_code)
    if found := getattr(error, "possibilities", None):  # of an unknown option
        hidden: set[str] = set()
        for one in error.ctx.command.params:
            hidden.update((*one.opts, *one.secondary_opts) if one.hidden else ())
        error.possibilities = [name for name in found if name not in hidden]
    message = error.format_message().replace("Value error, ", "")  # pydantic's word
    if message.startswith("Usage:"):
        error.show()
        sys.exit(error.exit_code)
    message = message.replace(". Did you mean", "; did you mean")
    command = f"{error.ctx.command_path} --help" if error.ctx else "iobench --help"
    if found := re.fullmatch(r"Invalid value for '(\S+)': Input should be (.*)", message):
        option, allowed = found.groups()  # pydantic's words, without the value
        allowed = allowed.partition(", unable to parse")[0]
        after = sys.argv[sys.argv.index(option) + 1 :][:1] if option in sys.argv else []
        message = f"{' '.join((option, *after))}: must be {allowed}"
    if found := re.fullmatch(r"Invalid value for '(\S+)': '(.*)' is not one of (.*)", message):
        option, value, listed = found.groups()  # typer's words
        *some, last = listed.replace("'", "").split(", ")
        message = f"{option} {value}: choose {', '.join(some)} or {last}"
    end = " See" if message.endswith("?") else "; see"
    _fail(f"{message.rstrip('.')}{end} {command}", error.exit_code)


def _fail(message: str, code: int) -> NoReturn:
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    begin = f"iobench {verb}: " if verb in VERBS and code != _INTERRUPTED else "iobench: "
    print_plan([f"{begin}{printable(' '.join(message.split()))}"], indent=" " * len(begin))
    sys.exit(code)
