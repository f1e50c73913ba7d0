"""Progress: which parts of a file are complete. A WatchedImage reports what has been filled."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Mapping, Sequence

from iobench.writers.image import FileImage, WrappedImage


class Progress:
    """Parts [start, stop) of a file that do not overlap. Thread-safe."""

    def __init__(self, parts: Sequence[tuple[int, int]]) -> None:
        """`parts` in file order; they are known by their place in this list."""
        self._parts = parts
        self._starts = [start for start, _ in parts]
        self._filled: dict[int, dict[int, int]] = {}
        self._complete = [False] * len(parts)
        self._lock = threading.Lock()

    def filled(self, start: int, stop: int) -> list[int]:
        """Return the numbers of the parts that are complete now that [start, stop) is filled.

        Each is returned once, whatever ranges are filled a second time.
        """
        complete = []
        with self._lock:
            first = max(0, bisect.bisect_right(self._starts, start) - 1)
            for number in range(first, bisect.bisect_left(self._starts, stop)):
                begin, end = self._parts[number]
                if self._complete[number] or end <= start:
                    continue
                ranges = self._filled.setdefault(number, {})
                at = max(start, begin)
                ranges[at] = max(min(stop, end), ranges.get(at, 0))
                if _covers(ranges, begin, end):
                    self._complete[number] = True
                    del self._filled[number]
                    complete.append(number)
        return complete


def _covers(ranges: Mapping[int, int], start: int, stop: int) -> bool:
    """Whether the ranges, of which each start has its stop, cover [start, stop)."""
    for begin, end in sorted(ranges.items()):
        if begin > start:
            return False
        start = max(start, end)
    return start >= stop


class WatchedImage(WrappedImage):
    """The image `image`; `noted` is called with each range that a writer has filled."""

    def __init__(self, image: FileImage, noted: Callable[[int, int], None]) -> None:
        super().__init__(image, _noted=noted)

    _noted: Callable[[int, int], None]

    def filled(self, start: int, stop: int) -> None:
        super().filled(start, stop)
        self._noted(start, stop)
