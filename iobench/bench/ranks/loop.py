"""Restore one checkpoint, cold each time, over and over, until rank 0 ends that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from iobench.bench.counters.monitor import Usage
from iobench.bench.processes.job import CheckpointRef, Job
from iobench.bench.targets.cold import FilesBelow, evict
from iobench.writers.s3_store.target import is_s3

RESTORES_BEGIN, RESTORES_END = "restores begin", "restores end"
"""The calls of a loop, in a control plane of their own: the loop is one command of the other."""


@dataclass(frozen=True, kw_only=True)
class Looped:
    """What a loop did: when each restore began and ended, by time.perf_counter.

    `size_bytes` are the bytes of one restore. `read_bytes` are those that the kernel counted as
    read from storage by this process, for all of them together; None without such a counter, and
    for an object store. `resident_fraction` is the largest part of the files that was in the page
    cache when a restore began. `mismatches` are the wrong tensors of the last one.
    """

    spans: tuple[tuple[float, float], ...]
    size_bytes: int
    read_bytes: int | None
    resident_fraction: float
    mismatches: int


def restore_until(
    job: Job, ref: CheckpointRef, begins: Callable[[], object], ended_s: Callable[[], float | None]
) -> Looped:
    """Restore `ref` until `ended_s` returns a time, and cut no restore short.

    `begins` is called when the first restore begins. The last one ends after the time that
    `ended_s` returns, also where this process was not running then, between two restores.
    """
    spans, resident = list[tuple[float, float]](), 0.0
    job.scrub(ref.shape, None)
    before, size_bytes, until_s = Usage.now(), 0, None
    while until_s is None or spans[-1][1] < until_s:
        resident = max(resident, _leave_the_cache(ref))
        began_s = time.perf_counter()
        if not spans:
            begins()
        done = job.restore(ref)
        spans.append((began_s, done.at_s))
        size_bytes = done.transfer.bytes
        until_s = until_s or ended_s()
    used = Usage.now() - before
    return Looped(
        spans=tuple(spans),
        size_bytes=size_bytes,
        read_bytes=used.io.get("read_bytes") if not is_s3(ref.directory) else None,
        resident_fraction=resident,
        mismatches=job.verify(ref).mismatches,
    )


def _leave_the_cache(ref: CheckpointRef) -> float:
    """Evict the files, and return the part of their bytes that stayed."""
    if is_s3(ref.directory):
        return 0.0
    left = evict(FilesBelow(ref.directory), beside=True)
    return left.resident_bytes / left.size_bytes if left.size_bytes else 0.0
