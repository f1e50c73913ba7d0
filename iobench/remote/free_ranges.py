"""FreeRanges: which parts of a device are free."""

from __future__ import annotations

import threading

__all__ = ["FreeRanges"]


class FreeRanges:
    """Gives out ranges of `size_bytes`, the first one that is large enough. Any thread may call."""

    def __init__(self, size_bytes: int) -> None:
        self._free = [(0, size_bytes)]  # (start, stop) in order, never adjacent
        self._lock = threading.RLock()  # a finalizer may give a range back in the middle of `take`

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        with self._lock:
            return max((stop - start for start, stop in self._free), default=0)

    def take(self, size_bytes: int) -> int | None:
        """Return the start of a range that is taken now; None when no free range is as large."""
        with self._lock:
            for number, (start, stop) in enumerate(self._free):
                if stop - start >= size_bytes:
                    rest = start + size_bytes
                    self._free[number : number + 1] = [(rest, stop)] if rest < stop else []
                    return start
        return None

    def give(self, start: int, size_bytes: int) -> None:
        """Make a range free that was taken."""
        with self._lock:
            merged: list[tuple[int, int]] = []
            for begin, end in sorted([*self._free, (start, start + size_bytes)]):
                if merged and merged[-1][1] == begin:
                    merged[-1] = (merged[-1][0], end)
                else:
                    merged.append((begin, end))
            self._free = merged
