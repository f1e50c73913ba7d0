"""`iobench exec`: run an unmodified script, with its checkpoints over the tuned path."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from iobench.cli.given import print_plan
from iobench.errors import TargetError, TransferError
from iobench.text import printable

if TYPE_CHECKING:
    from iobench.writers.base import Writer


SETTINGS = {"context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False}}


def exec_(command: list[str], config: str, report: Path | None = None) -> None:
    """Run a script unchanged; a writer saves and loads its files.

    torch.save and torch.load of paths, save_file, load_file and safe_open of safetensors and the
    files of DCP's FileSystemWriter take the writer's path, in child processes too. The files equal
    those of the stock functions byte for byte, and are durable when the call returns. Other calls
    are left to the stock functions. The summary at the end, on stderr, gives the reasons. The exit
    code is that of the script.

    Arguments:
        -- COMMAND...: What to run: python train.py --steps 100

    Options:
        --config WRITER: The writer.toml of iobench autotune, or a writer with options:
            odirect,block_size=8MiB
        --report FILE: Write what was redirected to this file, as JSON.
    """
    from iobench.integrations.default_writer import chosen_writer
    from iobench.integrations.redirect import launch as launching
    from iobench.writers.local.new_file import check_replaceable, existing_file

    writer = chosen_writer(config)
    if report is not None and not os.access(report.parent, os.W_OK):
        raise TargetError(f"--report {report}: its directory is missing or not writable")
    if report is not None:
        check_replaceable(f"--report {report}", existing_file(report)[1])
    outcome = launching.launch(command, writer, lambda: _try_here(writer))
    lines = (f"iobench exec: {printable(line)}" for line in launching.summary(outcome, writer))
    print_plan(lines, indent=" " * len("iobench exec:   "))
    if report is not None:
        try:
            launching.write_report(report, launching.report(outcome, command, writer))
        except OSError as error:
            raise TransferError.wrap(error, "writing --report", report) from error
    if outcome.returncode < 0:
        _die_of(-outcome.returncode)
    raise typer.Exit(outcome.returncode)


def _try_here(writer: Writer) -> None:
    """Report on stderr if the writer does not work in this directory. Raises nothing.

    The script runs already, and its end must be waited for.
    """
    if "file" not in writer.schemes:
        return
    try:
        answer = writer.available(".")
        reason = None if answer.ok else answer.reason
    except Exception as error:  # noqa: BLE001 -- writers of others raise any type
        reason = f"{type(error).__name__}: {error}."
    if reason is not None:
        note = f"writer {writer.name} does not work in this directory: {reason}"
        remedy = "Where it does not, the stock functions are used."
        print(f"iobench exec: {printable(f'{note} {remedy}')}", file=sys.stderr)


def _die_of(number: int) -> NoReturn:
    """End by the signal `number` that ended the script, so that the parent process sees it."""
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # keep the script's core file only
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    sys.exit(128 + number)  # if the signal does not end this process
