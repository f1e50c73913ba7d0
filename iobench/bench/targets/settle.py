"""Settle: wait until no earlier work is pending in the file system and the device."""

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
    """Sync the file system, then wait until the device is idle for 0.1 s, at most 3 s.

    First waits until the space of replaced files is freed. A sample leaves work behind: write-back,
    discards of removed files, journal commits. The wait keeps it out of the next sample's time.
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
