"""Helpers of the verbs that measure: a local server, and a stdout that has only the report."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from iobench.cli.given import check_target
from iobench.errors import UsageError

__all__ = ["HERE", "preparing", "print_plan", "print_warning", "quiet_stdout", "server"]

HERE = "."
"""The default of --target."""
_PLAN_INDENT = " " * 10  # width of the names of a plan's lines


@contextmanager
def server(wanted: bool, target: str) -> Iterator[str]:
    """Yield the target: the given one, or that of a local server that runs during the block."""
    check_target(target)
    if not wanted:
        yield target
        return
    if target != HERE:
        raise UsageError(f"--s3-local makes a target of its own; leave out --target {target}")
    from iobench.bench.targets.local_s3 import local_s3

    with local_s3() as own, own.active():
        yield f"{own.target}/run"


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Redirect output of libraries from stdout to stderr: stdout has only the report."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def print_plan(lines: Iterable[str], *, indent: str = _PLAN_INDENT) -> None:
    """Print lines to stderr, wrapped between words if it is a terminal."""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 0
    for line in lines:
        if 0 < width < len(line):
            from iobench.report.grid import wrapped  # it loads rich, so only for a long line

            line = wrapped(line, width, indent)
        print(line, file=sys.stderr)


def print_warning(text: str) -> None:
    """Print a warning to stderr, wrapped like a plan."""
    print_plan([f"warning: {text}"], indent=" " * len("warning: "))


@contextmanager
def preparing(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Show `what` on a terminal during the block, before there is other progress.

    Plans load many modules and probe the writers, which takes seconds without other output.
    """
    if quiet or not sys.stderr.isatty():
        yield
        return
    print(f"{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # back to the start, and clear
