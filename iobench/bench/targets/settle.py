"""Settle: wait until earlier work has left the file system and the device alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

from iobench import linux
from iobench.bench.counters.monitor import Monitor
from iobench.writers.local import deferred_free

__all__ = ["settle"]

_INTERVAL_S = 0.1
_PATIENCE_S = 3.0


def settle(directory: Path, monitor: Monitor) -> None:
    """Sync the file system, then wait until the device has rested for a moment, 3 s at most.

    First waits until the space of replaced files is freed. So the work that one sample leaves
    behind (write-back, discards of removed files, journal commits) is not in the time of the next.
    """
    deferred_free.wait()
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        linux.sync_file_system(fd)
    finally:
        os.close(fd)
    deadline = time.monotonic() + _PATIENCE_S
    before = monitor.read()
    while time.monotonic() < deadline:
        time.sleep(_INTERVAL_S)
        now = monitor.read()
        if now == before:
            return
        before = now
