"""Loop: a job restores one checkpoint, cold each time, over and over, until its parent ends that.

The parent sends the loop like any command. The job answers when its first restore begins. The next
message is the time at which the parent ends it, and the reply is the result.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from iobench.bench.counters.monitor import Usage
from iobench.bench.processes.job import CheckpointRef, Job
from iobench.bench.targets.cold import evict
from iobench.bench.targets.entries import FilesBelow
from iobench.writers.s3_store.target import is_s3

__all__ = ["Loop", "Looped"]


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


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Restores `ref` until its parent ends it, and cuts no restore short.

    The last restore ends after the parent's message, also where the job itself was not running
    when that was sent, between two restores.
    """

    ref: CheckpointRef

    def run(self, job: Job, connection: Connection) -> Looped:
        """Return what was restored. Raises EOFError when the parent has ended."""
        ref, spans, resident = self.ref, list[tuple[float, float]](), 0.0
        job.scrub(ref.shape, None)
        before, size_bytes, until_s = Usage.now(), 0, math.inf
        while not spans or spans[-1][1] < until_s:
            resident = max(resident, self._leave_the_cache())
            began_s = time.perf_counter()
            if not spans:
                connection.send(None)
            done = job.restore(ref)
            spans.append((began_s, done.at_s))
            size_bytes = done.transfer.bytes
            if connection.poll():
                until_s = connection.recv()
        used = Usage.now() - before
        return Looped(
            spans=tuple(spans),
            size_bytes=size_bytes,
            read_bytes=used.io.get("read_bytes") if not is_s3(ref.directory) else None,
            resident_fraction=resident,
            mismatches=job.verify(ref).mismatches,
        )

    def _leave_the_cache(self) -> float:
        """Evict the files, and return the part of their bytes that stayed."""
        if is_s3(self.ref.directory):
            return 0.0
        left = evict(FilesBelow(self.ref.directory), beside=True)
        return left.resident_bytes / left.size_bytes if left.size_bytes else 0.0
