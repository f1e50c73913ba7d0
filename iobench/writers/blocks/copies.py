"""copy_bytes: a copy of host memory by the fastest of two loops on this processor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from iobench.units import KIB, MIB
from iobench.writers.blocks.pages import Bytes

__all__ = ["LARGE", "CopyLoops", "copy_bytes", "gather_views", "scatter_views"]

LARGE = 64 * KIB
"""From here on the choice of the loop pays for the call."""
_SMALL = 16 * KIB
_WORTH_TIMING = 4 * MIB  # not the copies to blocks, which are in the processor's cache
_TRIALS = 6


def _memmove(source: Bytes, target: Bytes) -> None:
    """Copy by glibc's memmove: `rep movsb` on processors with ERMS."""
    np.copyto(target, source)


def _vector(source: Bytes, target: Bytes) -> None:
    """Copy by numpy's vector loop: loads, `x | x`, stores. numpy's own copies call memmove."""
    np.bitwise_or(source, source, out=target)


class CopyLoops:
    """Two loops that copy. The first copies of 4 MiB and more are timed, by turns.

    After six of each, the loop with the shortest CPU time per byte copies everything. On an AMD
    EPYC of 2025 the vector loop takes 0.8 of the time of memmove (docs/decisions/0063); where
    `rep movsb` writes without reading the target first, memmove may be faster. Thread-safe: a lost
    trial is repeated.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._trials: dict[Callable[[Bytes, Bytes], None], list[float]] = {
            _vector: [],
            _memmove: [],
        }
        self.chosen: Callable[[Bytes, Bytes], None] | None = None
        """The loop that is used from now on; None before it is known."""

    def copy(self, source: Bytes, target: Bytes) -> None:
        """Copy `source` to `target`, which has the same length, without the GIL."""
        if self.chosen is not None or len(source) < _WORTH_TIMING:
            (self.chosen or _memmove)(source, target)
            return
        loop = min(self._trials, key=lambda one: len(self._trials[one]))
        began_s = self._clock()
        loop(source, target)
        self._trials[loop].append((self._clock() - began_s) / len(source))
        if all(len(trials) >= _TRIALS for trials in self._trials.values()):
            self.chosen = min(self._trials, key=lambda one: min(self._trials[one]))


copy_bytes = CopyLoops().copy


def gather_views(views: Sequence[Bytes], block: Bytes) -> None:
    """Copy `views` one after the other to the beginning of `block`, without the GIL.

    A run of small ones is one call: np.concatenate. Of many small ones none is looked at alone.
    """
    if len(views) * _SMALL > len(block):
        _concatenated(views, block, 0)
        return
    position = first = 0
    for at, view in enumerate(views):
        if len(view) < LARGE:
            continue
        position = _concatenated(views[first:at], block, position)
        copy_bytes(view, block[position : position + len(view)])
        position, first = position + len(view), at + 1
    _concatenated(views[first:], block, position)


def scatter_views(block: Bytes, views: Sequence[Bytes]) -> int:
    """Fill `views` one after the other from the beginning of `block`, without the GIL.

    Returns their bytes.
    """
    position = 0
    for view in views:
        stop = position + len(view)
        if len(view) < LARGE:
            np.copyto(view, block[position:stop])
        else:
            copy_bytes(block[position:stop], view)
        position = stop
    return position


def _concatenated(views: Sequence[Bytes], block: Bytes, position: int) -> int:
    """Copy `views` to `block` from `position` on; return the position after them."""
    stop = position + sum(map(len, views))
    if stop > position:
        np.concatenate(views, out=block[position:stop])
    return stop
