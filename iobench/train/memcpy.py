"""Memory copy rate of this machine: the reference for the rate of a snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from iobench.bench.judging.stats import median
from iobench.units import MIB

__all__ = ["memcpy_bytes_per_s"]

_MEMCPY_BYTES, _MEMCPY_ROUNDS = 256 * MIB, 5


def memcpy_bytes_per_s(size_bytes: int) -> float:
    """Return the rate of copies between allocated buffers.

    It is the better of torch, with all threads, and numpy, with one. Each is the median of 5 copies
    of 256 MiB, or of `size_bytes` where that is less.
    """
    count = min(size_bytes, _MEMCPY_BYTES)
    source, copy = torch.ones(count, dtype=torch.uint8), torch.ones(count, dtype=torch.uint8)
    into, out_of = copy.numpy(), source.numpy()

    def by_numpy() -> None:
        into[:] = out_of

    ways: Sequence[Callable[[], object]] = (lambda: copy.copy_(source), by_numpy)
    return count / min(median([_timed(way) for _ in range(_MEMCPY_ROUNDS)]) for way in ways)


def _timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
