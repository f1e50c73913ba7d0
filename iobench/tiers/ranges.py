"""SharedRanges: the bytes of one file, shared out to a read from two tiers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["FileRange", "SharedRanges", "next_size"]

FileRange = tuple[int, int]
"""Bytes [start, stop) of a file."""


def next_size(
    left: int, own_rate: float | None, other_rate: float | None, *, least: int, most: int
) -> int:
    """Return how many bytes a tier takes next of the `left` ones; 0: the other one is faster alone.

    Half of its share, so that both tiers end together, from `least` to `most`. Rates are bytes per
    second. A tier that was not measured yet takes `least`. A share below `least` is not taken: the
    other tier would wait for it.
    """
    if own_rate is None or other_rate is None:
        return least if own_rate is None else most
    share = left * own_rate / (own_rate + other_rate)
    return 0 if share < least else min(most, max(least, int(share / 2)))


class SharedRanges:
    """The bytes [start, stop) of a file. The first tier takes them from the front, the second from
    the back.

    The first tier never waits for the second one: when nothing else is left, it takes the range
    that the second one has not delivered yet, which then counts as the first one's. A range is
    filled inside of `deliver`, so no byte changes after its range was taken away.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._lock = threading.RLock()
        self._front, self._back = start, stop
        self._returned: list[FileRange] = []
        self._lent: FileRange | None = None
        self._closed = False

    @property
    def left(self) -> int:
        """Bytes that no tier has taken."""
        with self._lock:
            return self._back - self._front + sum(stop - start for start, stop in self._returned)

    def take_front(self, size_bytes: int) -> FileRange | None:
        """Return the next range of the first tier, at most `size_bytes`; None: all are done."""
        with self._lock:
            found = self._take(size_bytes, front=True)
            if found is None:
                found, self._lent = self._lent, None
            return found

    def give_back(self, part: FileRange) -> None:
        """Return a range that could not be read; its bytes are undefined."""
        with self._lock:
            self._returned.append(part)

    def take_back(self, size_bytes: int) -> FileRange | None:
        """Return the next range of the second tier; None: nothing is left, or it is closed."""
        with self._lock:
            if self._closed or not size_bytes:
                return None
            self._lent = self._take(size_bytes, front=False)
            return self._lent

    def deliver(self, part: FileRange, fill: Callable[[], None]) -> bool:
        """Call `fill` for a range of the second tier, unless the first one has taken it."""
        with self._lock:
            if self._closed or self._lent != part:
                return False
            fill()
            self._lent = None
            return True

    def withdraw(self) -> None:
        """Give up the range of the second tier, which could not be read."""
        with self._lock:
            if self._lent is not None:
                self._returned.append(self._lent)
                self._lent = None

    def close(self) -> None:
        """Let the second tier deliver nothing more."""
        with self._lock:
            self._closed = True
            self.withdraw()

    def _take(self, size_bytes: int, *, front: bool) -> FileRange | None:
        if self._returned:
            start, stop = self._returned.pop()
            if stop - start > size_bytes:
                self._returned.append((start + size_bytes, stop))
                stop = start + size_bytes
            return start, stop
        size = min(size_bytes, self._back - self._front)
        if not size:
            return None
        if front:
            self._front += size
            return self._front - size, self._front
        self._back -= size
        return self._back, self._back + size
