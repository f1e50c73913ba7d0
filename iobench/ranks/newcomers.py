"""Newcomers: connections whose other end has not proven yet that it belongs to the job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

__all__ = ["Newcomers"]


class Newcomers:
    """Limits how many strangers may keep a connection, and for how long.

    Anyone on the network may connect. Without limits, connections that say nothing, or one byte in
    a while, would take all descriptors of the process. All methods may be called from any thread.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        self._most, self._patience_s = most, patience_s
        self._closes: dict[Hashable, tuple[float, Callable[[], object]]] = {}
        self._lock = threading.Lock()

    def add(self, connection: Hashable, close: Callable[[], object]) -> None:
        """Add a connection, which `close` ends. If there are too many, the oldest one is ended."""
        with self._lock:
            self._closes[connection] = time.monotonic(), close
            excess = len(self._closes) > self._most
        if excess:
            self.end_oldest()

    def remove(self, connection: Hashable) -> None:
        """Remove a connection that has proven itself, or has ended."""
        with self._lock:
            self._closes.pop(connection, None)

    def end_oldest(self) -> None:
        """End the oldest connection, if there is one."""
        with self._lock:
            found = next(iter(self._closes), None)
            close = None if found is None else self._closes.pop(found)[1]
        if close is not None:
            close()

    def end_late(self) -> None:
        """End the connections that are older than `patience_s`."""
        since_s = time.monotonic() - self._patience_s
        with self._lock:
            late = [one for one, (began_s, _) in self._closes.items() if began_s < since_s]
            closes = [self._closes.pop(one)[1] for one in late]
        for close in closes:
            close()
