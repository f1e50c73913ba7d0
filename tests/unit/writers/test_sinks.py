"""Uncached writes through the page cache."""

from __future__ import annotations

import os

import numpy as np
import pytest

from iobench import linux
from iobench.testing import content
from iobench.writers.direct.file import CachedFile, DontCache
from iobench.writers.direct.policy import IoPath
from iobench.writers.local.posix import pwrite_all
from iobench.writers.transfer import Meter, PathCount


class _Pushing(CachedFile):
    """The uncached writes of a file without RWF_DONTCACHE."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, DontCache("uncached", "sync_file_range"), waits=False)

    def push(self, views: list[np.ndarray], offset: int, meter: Meter) -> None:
        self.write_views(IoPath.UNCACHED, views, offset, sum(map(len, views)), meter)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The calls for write-back and for the page cache, in order."""
    seen: list[tuple[str, int, int]] = []

    def sync(fd: int, offset: int, length: int, flags: int) -> None:
        awaited = flags & linux.SYNC_FILE_RANGE_WAIT_AFTER
        seen.append(("await" if awaited else "start", offset, length))

    def advise(fd: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        seen.append(("drop", offset, length))

    monkeypatch.setattr(linux, "sync_file_range", sync)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    return seen


def test_the_flags_are_in_every_call(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The continuation of a short write has the flags too."""
    seen: list[int] = []
    real = os.pwritev

    def write(number: int, views: list[np.ndarray], offset: int, flags: int) -> int:
        seen.append(flags)
        return real(number, [views[0][:3]], offset)

    monkeypatch.setattr(os, "pwritev", write)
    assert pwrite_all(fd, [content(7)], 0, linux.RWF_DONTCACHE) == 3
    assert seen == [linux.RWF_DONTCACHE] * 3


def test_pushing_starts_at_once_and_drops_behind(fd: int, ranges: list) -> None:
    """Write-back of each block starts at once; the block five behind is awaited and dropped."""
    sink, meter = _Pushing(fd), Meter()
    for block in range(6):
        sink.push([content(100)], 100 * block, meter)
    assert ranges == [
        *(("start", 100 * block, 100) for block in range(5)),
        *(("await", 0, 100), ("drop", 0, 100)),
        ("start", 500, 100),
        *(("await", 100, 100), ("drop", 100, 100)),
    ]
    assert meter.paths == {"sync_file_range": PathCount(operations=6, bytes=600)}


def test_pushing_finishes_what_is_behind(fd: int, ranges: list) -> None:
    """finish awaits and drops every remaining block once."""
    sink = _Pushing(fd)
    for block in range(3):
        sink.push([content(100)], 100 * block, Meter())
    del ranges[:]
    sink.finish()
    sink.finish()
    assert ranges == [
        step
        for block in range(3)
        for step in (("await", 100 * block, 100), ("drop", 100 * block, 100))
    ]


def test_pushing_for_real(fd: int) -> None:
    """On the real kernel the bytes are written, and none stays in the page cache."""
    data, sink = content(10 * 4096), _Pushing(fd)
    for block in range(10):
        sink.push([data[4096 * block : 4096 * (block + 1)]], 4096 * block, Meter())
    sink.finish()
    resident = linux.resident_bytes(fd)[0]
    assert os.pread(fd, len(data), 0) == data.tobytes()
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident == linux.resident_bytes(fd)[0]  # nothing was left to drop, tmpfs aside
