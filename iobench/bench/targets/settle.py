"""Settle: wait until no earlier work is pending in the file system and the device."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from iobench import linux
from iobench.bench.targets.cold import opened
from iobench.environment import DeviceMonitor
from iobench.writers.local import deferred_free

# In 62 waits on an ext4 disk, work of a sample came back 13 times after 52 to 89 ms of rest.
_INTERVAL_S = 0.1
_LONGEST_S, _SHORTEST_S = 3.0, 0.375
_EARLY = "it began before the device was idle; after such a wait the next ones are shorter"


class Patience:
    """How long to wait for an idle device: 3 s, and a quarter of it after a wait in vain.

    While other programs use the device, a long wait changes nothing. A wait that found the device
    idle doubles the time again: where every second wait is in vain, one takes 0.4 to 0.8 s. With a
    `longest_s` of 0 there is no wait after the sync: a cache or burst credits recover in it.
    """

    def __init__(self, longest_s: float = _LONGEST_S) -> None:
        self.seconds = self._longest_s = longest_s
        self.notes: tuple[str, ...] = ()
        """For the record of the operation that begins after the last wait."""

    def ended(self, *, idle: bool) -> None:
        """Adapt to the result of a wait."""
        shorter = self.seconds < self._longest_s
        self.notes = (_EARLY,) if shorter and not idle else ()
        factor = 2.0 if idle else 0.25
        self.seconds = min(max(self.seconds * factor, _SHORTEST_S), self._longest_s)


@contextmanager
def settled(
    directory: Path, monitor: DeviceMonitor, patience: Patience | None = None
) -> Iterator[None]:
    """Sync the file system while the block runs, then wait until the device was idle for 0.1 s.

    A sample leaves work behind: write-back, discards of removed files, journal commits. The wait
    keeps it out of the next sample's time. Before the sync, the space of removed and replaced files
    is freed. The block may prepare the next operation in memory: the time after the sync in which
    the device is idle during the block counts. The wait ends after `patience`, counted from the
    sync.
    """
    patience = patience or Patience()
    with ThreadPoolExecutor(1, thread_name_prefix="iobench-sync") as thread:
        synced = thread.submit(_sync, directory, monitor)
        yield
        began_s, before = synced.result()
    patience.ended(idle=_rests(monitor, began_s, before, began_s + patience.seconds))


def _sync(directory: Path, monitor: DeviceMonitor) -> tuple[float, object]:
    """Sync the file system. Return the time after it, and the counters at this time."""
    deferred_free.wait()
    with opened(directory, os.O_DIRECTORY) as fd:
        linux.sync_file_system(fd)
    return time.monotonic(), monitor.read()


def _rests(monitor: DeviceMonitor, since_s: float, before: object, deadline_s: float) -> bool:
    """Wait until the counters have not moved for 0.1 s; return False at the deadline.

    `before` are the counters at `since_s`.
    """
    while True:
        now, now_s = monitor.read(), time.monotonic()
        if now != before:
            before, since_s = now, now_s
        left_s = _INTERVAL_S - (now_s - since_s)
        if left_s < 1e-9:  # sums of floats may be just below the interval
            return True
        if now_s >= deadline_s:
            return False
        time.sleep(min(left_s, deadline_s - now_s))
