"""hybrid: the path of each operation, never two paths for one page, and refused paths."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iobench import linux
from iobench.errors import UnavailableError
from iobench.testing import content
from iobench.units import KIB
from iobench.writers import file_writer
from iobench.writers.direct import engine as direct_engine
from iobench.writers.direct import file as path_file
from iobench.writers.direct.engine import BlockingEngine, RingEngine
from iobench.writers.direct.file import (
    FileSetting,
    IoPath,
    PathFile,
)
from iobench.writers.direct.ring import PyuringRing, Ring
from iobench.writers.hybrid import HybridWriter
from iobench.writers.image import FileImage
from iobench.writers.transfer import Transfer

_BLOCK = 64 * KIB
_SMALL = 16 * KIB
_PAGE = linux.PAGE


def _writer(**options: object) -> HybridWriter:
    return HybridWriter(**{"block_size": _BLOCK, "iodepth": 3, "small_size": _SMALL, **options})


def _require_direct(directory: Path) -> None:
    reason = _writer().available(directory).reason
    if "O_DIRECT" in reason:
        pytest.skip(reason)


def _require_ring(directory: Path) -> None:
    _require_direct(directory)
    reason = _writer().available(directory).reason
    if "uring" in reason:  # no io_uring, or no pyuring
        pytest.skip(reason)


class _Paths:
    """The operations of each path: (path, first byte, end), in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int, int]] = []
        self.left: list[tuple[int, int]] = []
        leave = PathFile.leave
        cached = PathFile.write_cached

        def through(file, path, part, meter):
            cached(file, path, part, meter)
            self.seen.append((str(path), part.offset, part.offset + part.size_bytes))

        for engine in (BlockingEngine, RingEngine):
            monkeypatch.setattr(engine, "write", self._past(engine.write))

        def left(file, start, stop):
            leave(file, start, stop)
            self.left.append((start, stop))

        monkeypatch.setattr(PathFile, "write_cached", through)
        monkeypatch.setattr(PathFile, "leave", left)

    def _past(self, write):
        def past(engine, file, part, on_complete):
            write(engine, file, part, on_complete)
            self.seen.append(("direct", part.offset, part.offset + part.size_bytes))

        return past

    def pages(self) -> Counter[tuple[str, int]]:
        touched: set[tuple[str, int]] = set()
        for way, start, stop in self.seen:
            kind = "direct" if way == "direct" else "cached"
            touched |= {(kind, page) for page in range(start // _PAGE, -(-stop // _PAGE))}
        return Counter(page for _, page in touched)


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> _Paths:
    """The operations of each path in this test."""
    return _Paths(monkeypatch)


@pytest.fixture
def _any_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy chooses each of the three paths in turn for large operations."""
    real = FileSetting.choose
    turn = iter(range(1 << 30))

    def choose(policy: FileSetting, *operation: Any, **how: bool) -> tuple[IoPath, str]:
        chosen = real(policy, *operation, **how)
        if chosen[0] != IoPath.DIRECT or "aligned" not in how:  # the file is to be opened
            return chosen
        return tuple(IoPath)[next(turn) % 3], "in turn"

    monkeypatch.setattr(FileSetting, "choose", choose)


_FEW = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.usefixtures("_any_path")
@_FEW
@given(size=st.integers(0, 6 * _BLOCK), streamed=st.booleans(), uring=st.booleans())
def test_no_page_by_two_paths(
    tmp_path: Path, paths: _Paths, size: int, streamed: bool, uring: bool
) -> None:
    """For any choice of the policy, no page is used by both a cached and a direct write."""
    paths.seen.clear()
    data = content(size)
    if streamed:
        with _writer(uring=uring).open(tmp_path / "file") as stream:
            stream.write(data)
    else:
        _writer(uring=uring).write(FileImage.of("file", [data]), tmp_path)
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    assert sum(stop - start for _, start, stop in paths.seen) == size
    assert all(count == 1 for count in paths.pages().values()), paths.seen


@pytest.mark.usefixtures("_any_path")
@_FEW
@given(pieces=st.lists(st.integers(1, 3 * _BLOCK), min_size=1, max_size=6), uring=st.booleans())
def test_pages_written_twice_leave_the_cache_between(
    tmp_path: Path, paths: _Paths, pieces: list[int], uring: bool
) -> None:
    """A page written again after a flush takes the direct path only once it left the cache."""
    paths.seen.clear()
    paths.left.clear()
    data = content(sum(pieces))
    with _writer(uring=uring).open(tmp_path / "file") as stream:
        start = 0
        for length in pieces:
            stream.write(data[start : start + length])
            stream.flush()
            start += length
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    for number, (way, start, stop) in enumerate(paths.seen):
        before = paths.seen[:number]
        met = [one for one in before if one[0] != "direct" and one[1] < stop and start < one[2]]
        if way == "direct" and met:
            assert (start, stop) in paths.left


@pytest.mark.parametrize("size", [0, 1, 4096, _SMALL - 1])
def test_a_small_file_opens_nothing_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A file below small_size needs no second descriptor, no reservation and no thread."""

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(PathFile, "_open_direct", refuse)
    monkeypatch.setattr(linux, "fallocate", refuse)
    moved = _writer().write(FileImage.of("file", [content(size)]), tmp_path)
    assert set(moved.paths) <= {"buffered"}
    assert moved.decisions == ({"buffered: small": 1} if size else {})


def test_a_large_file_leaves_no_cache(tmp_path: Path) -> None:
    """After a write and a read of whole blocks nothing of the file is in the page cache."""
    _require_direct(tmp_path)
    data, writer = content(8 * _BLOCK), _writer(paths="direct")
    writer.write(FileImage.of("file", [data]), tmp_path)
    back = np.zeros_like(data)
    writer.read(FileImage.of("file", [back]), tmp_path)
    assert np.array_equal(back, data)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert linux.resident_bytes(fd)[0] == 0
    finally:
        os.close(fd)


def test_what_is_cached_when_the_read_begins(tmp_path: Path) -> None:
    """Only that is read from the page cache, not what the kernel reads ahead meanwhile."""
    _require_direct(tmp_path)
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 30)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        os.pread(fd, 10 * _BLOCK, 0)
        cached = linux.resident_bytes(fd)[0]
        os.truncate(tmp_path / "file", cached + 16 * _BLOCK)
        image = FileImage.of("file", [np.empty(cached + 16 * _BLOCK, dtype=np.uint8)])
        moved = _writer().read(image, tmp_path)
    finally:
        os.close(fd)
    assert moved.decisions["buffered: in the page cache"] == cached // _BLOCK


def test_aligned_memory_is_not_staged(tmp_path: Path) -> None:
    """Aligned memory is moved without a copy."""
    _require_direct(tmp_path)
    room = np.empty(3 * _BLOCK + _PAGE, dtype=np.uint8)
    begin = -room.ctypes.data % _PAGE
    moved = _writer(paths="direct").write(
        FileImage.of("file", [room[begin : begin + 2 * _BLOCK]]), tmp_path
    )
    assert moved.decisions == {"direct: large": 2}
    assert "gather" not in moved.phases_s


def _refused(call: str, real, number: int):
    def refusing(*arguments: object) -> object:
        if call == "open" and arguments[1] & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        if call == "pwritev" and len(arguments) > 3 and arguments[3]:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    return refusing


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.EINVAL, "refuses O_DIRECT"), (errno.ENOENT, "/proc, which is not mounted")],
)
def test_without_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    """When O_DIRECT or /proc is missing, the next path is used, and the fallback is recorded."""
    monkeypatch.setattr(os, "open", _refused("open", os.open, number))
    data, writer = content(4 * _BLOCK + 5), _writer()
    answer = writer.available(tmp_path)
    assert answer.ok
    assert reason in answer.reason
    moved = writer.write(FileImage.of("file", [data]), tmp_path)
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    assert "direct" not in moved.paths
    assert ("direct", "uncached") in {(one.wanted, one.used) for one in moved.fallbacks}
    back = np.zeros_like(data)
    moved = writer.read(FileImage.of("file", [back]), tmp_path)
    assert np.array_equal(back, data)
    with writer.open(tmp_path / "stream") as stream:
        stream.write(data)
    assert (tmp_path / "stream").read_bytes() == data.tobytes()


def test_without_dontcache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When RWF_DONTCACHE is refused, sync_file_range replaces it, and that is recorded."""
    monkeypatch.setattr(
        "iobench.writers.direct.file.dontcache_refusal",
        lambda _: "RWF_DONTCACHE is refused",
    )
    data, writer = content(4 * _BLOCK), _writer(paths="uncached")
    moved = writer.write(FileImage.of("file", [data]), tmp_path)
    assert set(moved.paths) == {"sync_file_range"}
    assert [(one.wanted, one.used) for one in moved.fallbacks] == [("uncached", "sync_file_range")]
    back = np.zeros_like(data)
    with (tmp_path / "file").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    moved = writer.read(FileImage.of("file", [back]), tmp_path)
    assert np.array_equal(back, data)
    assert len(moved.fallbacks) <= 1
    assert "RWF_DONTCACHE" in writer.available(tmp_path).reason


def test_a_refused_direct_write_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that accepts O_DIRECT in open but refuses the write loses no block: it is tried
    before the first."""

    pwrite = path_file.pwrite_all

    def refuse(*given: Any, unit: int = 1) -> int:
        if unit == 1:  # not a direct write
            return pwrite(*given)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(path_file, "pwrite_all", refuse)
    data = content(6 * _BLOCK)
    moved = _writer(uring=False).write(FileImage.of("file", [data]), tmp_path)
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    assert any("direct I/O is refused" in one.reason for one in moved.fallbacks)
    assert sum(moved.decisions.values()) == 6


def test_direct_in_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a direct write fills the page cache, O_DIRECT is not used, and that is recorded once for
    each file; the file system is asked once."""
    monkeypatch.setattr(linux, "cachestat_resident_bytes", lambda *_: _BLOCK)
    tried = []
    real = PathFile._tried
    monkeypatch.setattr(PathFile, "_tried", lambda *given: (tried.append(1), real(*given))[1])
    data, writer = content(6 * _BLOCK), _writer()
    for _ in range(2):
        moved = writer.write(FileImage.of("file", [data]), tmp_path)
        assert (tmp_path / "file").read_bytes() == data.tobytes()
        assert not [path for path in moved.paths if path.endswith("direct")]
        assert ("direct", "uncached") in {(one.wanted, one.used) for one in moved.fallbacks}
    assert len(tried) == 1


# The ring.


def _written(
    writer: HybridWriter, data: np.ndarray, directory: Path, *, streamed: bool
) -> Transfer:
    if not streamed:
        return writer.write(FileImage.of("file", [data]), directory)
    with writer.open(directory / "file") as stream:
        stream.write(data)
    assert stream.transfer is not None
    return stream.transfer


@pytest.mark.parametrize("streamed", [False, True])
def test_without_a_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool) -> None:
    """When the kernel refuses io_uring, threads replace it, and that is recorded."""

    def refuse(_: int) -> None:
        raise UnavailableError("uring", "io_uring is disabled.", "")

    _require_direct(tmp_path)
    monkeypatch.setattr(file_writer, "PyuringRing", refuse)
    data, writer = content(8 * _BLOCK), _writer(paths="direct")
    assert "io_uring is disabled; threads" in writer.available(tmp_path).reason
    moved = _written(writer, data, tmp_path, streamed=streamed)
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    assert set(moved.paths) == {"direct"}
    assert [(one.wanted, one.used) for one in moved.fallbacks] == [("io_uring", "threads")]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_ring_that_is_refused_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """When a later ring is refused, all is written without it, and that is recorded."""
    _require_ring(tmp_path)
    left = [1]

    def open_one(iodepth: int) -> Ring:
        if not left:
            raise UnavailableError("uring", "the kernel refuses a ring.", "")
        left.pop()
        return PyuringRing(iodepth)

    monkeypatch.setattr(file_writer, "PyuringRing", open_one)
    data = content(8 * _BLOCK)
    moved = _written(_writer(paths="direct"), data, tmp_path, streamed=streamed)
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    assert set(moved.paths) == {"direct"}
    assert [one.wanted for one in moved.fallbacks] == ["io_uring"]


@pytest.mark.parametrize("uring", [True, False])
def test_a_device_with_blocks_larger_than_a_page(
    tmp_path: Path, paths: _Paths, monkeypatch: pytest.MonkeyPatch, uring: bool
) -> None:
    """The alignment is known before the first operation is cut: nothing is refused or given up."""
    (_require_ring if uring else _require_direct)(tmp_path)
    paths.seen.clear()  # of the probe
    alignment = linux.DioAlignment(memory=_PAGE, offset=4 * _PAGE)
    monkeypatch.setattr(linux, "dio_alignment", lambda _: alignment)
    data = content(5 * _PAGE + _BLOCK)
    with _writer(uring=uring).open(tmp_path / "file") as stream:
        stream.write(data[: 5 * _PAGE])
        stream.flush()  # a first operation of whole pages, but not of whole sectors
        stream.write(data[5 * _PAGE :])
    assert stream.transfer
    assert stream.transfer.fallbacks == ()
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    assert paths.seen == [
        ("direct", 0, 4 * _PAGE),
        ("buffered", 4 * _PAGE, 5 * _PAGE),
        ("direct", 0, _BLOCK),
        ("direct", _BLOCK, _BLOCK + 4 * _PAGE),
        ("buffered", _BLOCK + 4 * _PAGE, _BLOCK + 5 * _PAGE),
    ]


def test_direct_reads_are_tried_in_each_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One directory of a device may refuse what another takes: an encrypted one, for example."""
    writer, data, pread = _writer(uring=False), content(4 * _BLOCK), path_file.pread_all
    image = FileImage.of("file", [np.empty_like(data)])
    for name in ("takes", "refuses"):
        writer.write(FileImage.of("file", [data]), tmp_path / name)

    def some(fd: int, *given: Any, unit: int = 1, **how: int) -> int:
        if unit > 1 and "/refuses/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        return pread(fd, *given, unit=unit, **how)

    monkeypatch.setattr(path_file, "pread_all", some)
    monkeypatch.setattr(direct_engine, "pread_all", some)
    monkeypatch.setattr(PathFile, "held", lambda *_: set())
    for name in ("takes", "refuses"):
        image.views(0, len(data))[0][:] = 0
        moved = writer.read(image, tmp_path / name)
        assert image.views(0, len(data))[0].tobytes() == data.tobytes()
    assert [one.wanted for one in moved.fallbacks] == ["direct"]


def test_a_read_from_the_middle_of_a_large_sector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that begin inside a sector go through the page cache; it is no fallback."""
    _require_direct(tmp_path)
    alignment = linux.DioAlignment(memory=_PAGE, offset=4 * _PAGE)
    monkeypatch.setattr(linux, "dio_alignment", lambda _: alignment)
    data = content(3 * _BLOCK)
    writer = _writer(paths="direct", uring=False)
    writer.write(FileImage.of("file", [data]), tmp_path)
    for start, direct in ((0, True), (_PAGE, False)):
        image = FileImage.of("file", [np.zeros(len(data), dtype=np.uint8)])
        moved = writer.read(image, tmp_path, start=start)
        assert moved.fallbacks == ()
        assert any(path.endswith("direct") for path in moved.paths) == direct
        assert np.array_equal(image.views(start, len(data))[0], data[start:])
