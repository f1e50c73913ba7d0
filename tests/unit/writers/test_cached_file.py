"""PathFile by the page cache: its state and that of the device after each kind of operation."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from iobench import linux
from iobench.testing import content
from iobench.units import MIB
from iobench.writers.direct.file import FileSetting, IoPath, PathFile, PathSupport
from iobench.writers.image import Extent, FileImage
from iobench.writers.local.posix import pwrite_all
from iobench.writers.transfer import Meter, PathCount

from ...conftest import MakeFilesystem

_DATA = np.random.default_rng(0).integers(0, 256, 4 * MIB, dtype=np.uint8)
_IMAGE = FileImage.of("file", [_DATA])


@pytest.fixture
def fd(shared_filesystems: MakeFilesystem) -> Iterator[int]:
    path = shared_filesystems("ext4") / "file"
    opened = os.open(path, os.O_CREAT | os.O_RDWR)
    os.ftruncate(opened, len(_DATA))
    yield opened
    os.close(opened)
    path.unlink()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The (offset, length) of every range whose write-back was awaited."""
    ranges: list[tuple[int, int]] = []
    real = linux.sync_file_range
    everything = (
        linux.SYNC_FILE_RANGE_WAIT_BEFORE
        | linux.SYNC_FILE_RANGE_WRITE
        | linux.SYNC_FILE_RANGE_WAIT_AFTER
    )

    def watched(fd: int, offset: int, length: int, flags: int) -> None:
        if flags == everything:
            ranges.append((offset, length))
        real(fd, offset, length, flags)

    monkeypatch.setattr(linux, "sync_file_range", watched)
    return ranges


def _opened(fd: int) -> PathFile:
    how = FileSetting(paths=tuple(IoPath), block_size=MIB)
    return PathFile(fd, "file", how, PathSupport("hybrid"), writing=True)


def _write(file: PathFile, path: IoPath, start: int, stop: int) -> None:
    file.write_cached(path, Extent(_IMAGE, start, stop, start), Meter())


def test_no_other_range_is_asked_about(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large file in the page cache, each page that is asked about takes time."""
    file, asked = _opened(fd), []
    _write(file, IoPath.BUFFERED, 0, 3 * MIB)
    real = linux.cachestat_resident_bytes

    def spy(fd: int, start: int, length: int) -> int:
        asked.append((start, length))
        return real(fd, start, length)

    monkeypatch.setattr(linux, "cachestat_resident_bytes", spy)
    assert file.held([(MIB, 2 * MIB), (2 * MIB, 3 * MIB)]) == {MIB, 2 * MIB}
    assert all(start >= MIB and 0 < length <= 2 * MIB for start, length in asked)
    assert file.held([]) == set()


def test_a_buffered_write_stays_until_its_range_is_left(
    fd: int, synced: list[tuple[int, int]]
) -> None:
    """Nothing is synced for a range of a file of which nothing was written."""
    file = _opened(fd)
    file.leave(0, 4 * MIB)
    for start in (0, MIB, 2 * MIB):
        _write(file, IoPath.BUFFERED, start, start + MIB)
    assert synced == []
    assert file.resident_bytes(0, 3 * MIB) == 3 * MIB
    file.leave(MIB, 2 * MIB)
    assert synced == [(MIB, MIB)]
    assert file.resident_bytes(MIB, MIB) == 0
    assert file.resident_bytes(0, MIB) == file.resident_bytes(2 * MIB, MIB) == MIB
    file.leave(0, 4 * MIB)
    assert file.resident_bytes(0, 4 * MIB) == 0
    assert os.pread(fd, 3 * MIB, 0) == _DATA[: 3 * MIB].tobytes()


@pytest.mark.parametrize("refused", ["", "RWF_DONTCACHE is refused"])
def test_an_uncached_write_is_on_the_device_on_return(
    fd: int, synced: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    if refused:
        monkeypatch.setattr("iobench.writers.direct.file.dontcache_refusal", lambda _: refused)
    _write(_opened(fd), IoPath.UNCACHED, MIB, 2 * MIB)
    assert synced == [(MIB, MIB)]
    assert os.pread(fd, MIB, MIB) == _DATA[MIB : 2 * MIB].tobytes()


def test_held_needs_every_page_in_the_cache(fd: int) -> None:
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert _opened(fd).held([(0, MIB)]) == set()
    _write(_opened(fd), IoPath.BUFFERED, 0, MIB)
    ranges = [(0, MIB), (4096, 8192), (MIB - 4096, MIB + 4096), (2 * MIB, 3 * MIB)]
    assert _opened(fd).held(ranges) == {0, 4096}


def test_without_cachestat(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError

    monkeypatch.setattr(linux, "cachestat_resident_bytes", refuse)
    _write(_opened(fd), IoPath.BUFFERED, 0, MIB)
    assert _opened(fd).held([(0, MIB)]) == set()


def test_what_a_read_leaves_in_the_page_cache(fd: int) -> None:
    os.pwrite(fd, _DATA.tobytes(), 0)
    os.fsync(fd)
    for path, left in ((IoPath.BUFFERED, True), (IoPath.UNCACHED, False)):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        memory = np.zeros(len(_DATA), dtype=np.uint8)
        file, image = _opened(fd), FileImage.of("file", [memory])
        file.read_cached(path, Extent(image, 0, MIB, 0), Meter())
        assert np.array_equal(memory[:MIB], _DATA[:MIB])
        assert not memory[MIB:].any()
        assert file.held([(0, MIB)]) == ({0} if left else set())


class _Pushing(PathFile):
    """The uncached writes of a file without RWF_DONTCACHE."""

    def __init__(self, fd: int) -> None:
        how = FileSetting(paths=(IoPath.UNCACHED,), block_size=MIB)
        support = PathSupport("uncached", "sync_file_range")
        super().__init__(fd, "file", how, support, writing=True)

    def push(self, data: np.ndarray, offset: int, meter: Meter) -> None:
        self.write_cached(IoPath.UNCACHED, Extent.of(data, offset), meter)


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
        sink.push(content(100), 100 * block, meter)
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
        sink.push(content(100), 100 * block, Meter())
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
        sink.push(data[4096 * block : 4096 * (block + 1)], 4096 * block, Meter())
    sink.finish()
    resident = linux.resident_bytes(fd)[0]
    assert os.pread(fd, len(data), 0) == data.tobytes()
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident == linux.resident_bytes(fd)[0]  # nothing was left to drop, tmpfs aside
