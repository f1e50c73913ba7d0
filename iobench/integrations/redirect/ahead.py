"""Imports of the first save, made in a thread while the script goes on after its import of torch.

They take 0.06 s of CPU time. Nothing is made or configured here: a script may still change the
environment, and a process may outlive `iobench exec`.
"""

from __future__ import annotations

import contextlib
import os
import threading

__all__ = ["begin"]

_LONGEST_WAIT_S = 1.0


def begin() -> None:
    """Start the thread, which ends by itself."""
    thread = threading.Thread(target=_run, name="iobench-ahead", daemon=True)
    # A child that is forked in the middle of an import finds that module locked for ever. The time
    # is limited because the thread itself may wait for a module that the forking thread imports.
    os.register_at_fork(before=lambda: thread.join(_LONGEST_WAIT_S))
    thread.start()


def _run() -> None:
    with contextlib.suppress(Exception):  # the first save does the same, and raises it
        from iobench.integrations import torch_transfer  # noqa: F401 -- for the first save
        from iobench.integrations.default_writer import import_writer

        import_writer()
