"""What verbs that measure share: a server of their own, and a stdout that nobody else writes to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from iobench.errors import UsageError

__all__ = ["HERE", "quiet_stdout", "server"]

HERE = "."
"""The default of --target."""


@contextmanager
def server(wanted: bool, target: str) -> Iterator[str]:
    """The target: as given, or of a server of our own that lives as long as the block."""
    if not target:  # an unset variable, in all likelihood
        raise UsageError("--target '': names nothing; leave it out for the current directory")
    if not wanted:
        yield target
        return
    if target != HERE:
        raise UsageError(f"--s3-local makes a target of its own; leave out --target {target}")
    from iobench.bench.targets.local_s3 import local_s3

    with local_s3() as server, server.active():
        yield f"{server.target}/run"


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Have what libraries print to stdout go to stderr: stdout is the report's alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
