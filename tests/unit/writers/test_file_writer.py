"""FileWriter: what its five presets report, and write_many with several files in flight."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iobench import linux
from iobench.errors import DataMismatchError, TransferError
from iobench.testing import Footprint, content
from iobench.units import KIB
from iobench.writers.base import Writer
from iobench.writers.direct import engine as direct_engine
from iobench.writers.direct.engine import DirectOperation, RingEngine
from iobench.writers.direct.file import PathFile
from iobench.writers.direct.ring import PyuringRing
from iobench.writers.image import Extent, FileImage
from iobench.writers.registry import make
from iobench.writers.transfer import Transfer

_BLOCK = 64 * KIB
_SIZE = 10 * _BLOCK + 123
_OPTIONS: dict[str, dict[str, Any]] = {
    "buffered": {},
    "uncached": {},
    "odirect": {},
    "uring": {"iodepth": 4},
    "hybrid": {"iodepth": 3, "small_size": 16 * KIB},
    "hybrid threads": {"iodepth": 3, "small_size": 16 * KIB, "uring": False},
}
_DIRECT = ("odirect", "uring", "hybrid", "hybrid threads")


def _writer(name: str, directory: Path) -> Writer:
    """Make a writer of small blocks; skip where it falls back to another path."""
    writer = make(name.removesuffix(" threads"), block_size=_BLOCK, **_OPTIONS[name])
    answer = writer.available(directory)
    if not answer.ok or answer.reason:
        pytest.skip(answer.reason)
    return writer


def _counts(moved: Transfer | None) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    assert moved is not None
    assert moved.fallbacks == ()
    paths = {name: (one.operations, one.bytes) for name, one in moved.paths.items()}
    return paths, dict(moved.decisions)


_PADDED = -1  # 10 blocks and one sector
_SECTOR = -2
_TAIL = {"buffered": (1, 123)}
_CHOSEN = {"direct: large": 10, "buffered: small": 1}
_GOLDEN: dict[str, list[tuple[dict[str, tuple[int, int]], dict[str, int]]]] = {
    "buffered": [({"buffered": (11, _SIZE)}, {})] * 3,
    "uncached": [({"uncached": (11, _SIZE)}, {})] * 3,
    "odirect": [
        ({"direct": (11, _PADDED)}, {}),
        ({"direct": (11, _SIZE)}, {}),
        ({"direct": (11, _PADDED)}, {}),
    ],
    "uring": [
        ({"io_uring direct": (11, _PADDED)}, {}),
        ({"io_uring direct": (11, _PADDED)}, {}),
        ({"io_uring direct": (10, 10 * _BLOCK), "direct": (1, _SECTOR)}, {}),
    ],
    "hybrid": [({"io_uring direct": (10, 10 * _BLOCK), **_TAIL}, _CHOSEN)] * 3,
    "hybrid threads": [({"direct": (10, 10 * _BLOCK), **_TAIL}, _CHOSEN)] * 3,
}


@pytest.mark.parametrize("name", _GOLDEN)
def test_what_a_transfer_counts(name: str, tmp_path: Path) -> None:
    """Operations and bytes by path, and decisions, of a write, a read and a stream."""
    writer, data = _writer(name, tmp_path), content(_SIZE + 1)[1:]  # at an odd address
    moved = [writer.write(FileImage.of("file", [data]), tmp_path)]
    assert moved[0].latencies["sync"].count == 1
    with (tmp_path / "file").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    back = np.zeros(_SIZE + 1, dtype=np.uint8)[1:]
    moved.append(writer.read(FileImage.of("file", [back]), tmp_path))
    assert np.array_equal(back, data)
    with writer.open(tmp_path / "stream") as stream:
        for start in range(0, _SIZE, 2 * _BLOCK):
            stream.write(data[start : start + 2 * _BLOCK])
    assert (tmp_path / "stream").read_bytes() == data.tobytes()
    if name in ("buffered", "uncached"):
        assert _counts(moved[0]) == _counts(moved[1]) == _GOLDEN[name][0]
        assert _counts(stream.transfer)[0].keys() == _GOLDEN[name][0][0].keys()
        return
    with (tmp_path / "file").open("rb") as file:
        alignment = linux.dio_alignment(file.fileno())
    sector = alignment.offset if alignment else linux.PAGE
    sizes = {_PADDED: 10 * _BLOCK + sector, _SECTOR: sector}
    for found, (paths, decisions) in zip((*moved, stream.transfer), _GOLDEN[name], strict=True):
        wanted = {path: (calls, sizes.get(size, size)) for path, (calls, size) in paths.items()}
        assert _counts(found) == (wanted, decisions)


def _images() -> list[FileImage]:
    """Four large files, one of which has no tail, and a small and an empty one between them."""
    sizes = [_SIZE, 6 * _BLOCK, 100, 0, _SIZE, _SIZE]
    return [FileImage.of(f"{n}", [content(size, seed=n)]) for n, size in enumerate(sizes)]


@pytest.mark.parametrize("name", ["uring", "hybrid"])
def test_the_next_file_begins_while_blocks_are_in_flight(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ring for all files: it never runs empty between two large ones."""
    writer = _writer(name, tmp_path)
    rings: list[RingEngine] = []
    init = RingEngine.__init__
    found: list[int] = []

    def made(ring: RingEngine, *given: Any, **options: Any) -> None:
        init(ring, *given, **options)
        rings.append(ring)

    def counting(move: Callable[..., None]) -> Callable[..., None]:
        def begun(file: PathFile, part: Extent, *given: Any, **options: Any) -> None:
            if not part.offset:
                found.append(sum(map(len, rings)))
            move(file, part, *given, **options)

        return begun

    monkeypatch.setattr(RingEngine, "__init__", made)
    monkeypatch.setattr(PathFile, "write", counting(PathFile.write))
    monkeypatch.setattr(PathFile, "read", counting(PathFile.read))
    images = [image for image in _images() if image.size_bytes > _BLOCK]
    for move in (writer.write_many, writer.read_many):
        move(images, tmp_path)
        assert len(rings) == 1
        assert len(found) == 4
        assert all(found[1:])
        rings.clear()
        found.clear()


@pytest.mark.parametrize("name", _DIRECT)
@pytest.mark.parametrize("nth", [0, 1, 4])
def test_an_error_names_its_file(
    name: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file is written when it is raised, and nothing is published."""
    writer, failing = _writer(name, tmp_path), f"{nth}"
    advance, pwrite = RingEngine._advance, direct_engine.pwrite_all

    def failed(ring: RingEngine, operation: DirectOperation, count: int) -> bool:
        last = 5 * _BLOCK
        if operation.file.name.endswith(f"/{failing}") and operation.offset == last:
            raise OSError(errno.EIO, "I/O error")
        return advance(ring, operation, count)

    def refused(fd: int, views: list[np.ndarray], offset: int, unit: int) -> int:
        if f".{failing}." in os.readlink(f"/proc/self/fd/{fd}") and offset == 5 * _BLOCK:
            raise OSError(errno.EIO, "I/O error")
        return pwrite(fd, views, offset, unit=unit)

    with monkeypatch.context() as patch, Footprint.unchanged():
        patch.setattr(RingEngine, "_advance", failed)
        patch.setattr(direct_engine, "pwrite_all", refused)
        with pytest.raises(TransferError) as caught:
            writer.write_many(_images(), tmp_path)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / failing))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", _OPTIONS)
def test_a_file_that_shrinks_while_it_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names it, also when several files are read."""
    writer, size = _writer(name, tmp_path), 40 * _BLOCK
    images = [FileImage.of(path, [content(size)]) for path in ("file", "next")]
    read = PathFile.read

    def cut(file: PathFile, *given: Any, **options: Any) -> None:
        os.truncate(tmp_path / "file", 30 * _BLOCK + 100)
        read(file, *given, **options)

    monkeypatch.setattr(PathFile, "read", cut)
    for move in (
        lambda: writer.read(images[0], tmp_path),
        lambda: writer.read_many(images, tmp_path),
    ):
        writer.write_many(images, tmp_path)
        with (tmp_path / "file").open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with pytest.raises(DataMismatchError, match=f"^{tmp_path}/file: the file ended at"):
            move()


def test_the_frames_of_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the module draws, from the loop over blocks to the ring."""
    writer, write = _writer("hybrid", tmp_path), PyuringRing.write
    seen: set[tuple[str, ...]] = set()

    def noted(ring: PyuringRing, *given: int) -> None:
        frame, names = sys._getframe(1), ["write"]
        while frame.f_code.co_name != "work":
            names.append(frame.f_code.co_name)
            assert frame.f_back is not None
            frame = frame.f_back
        seen.add(("work", *reversed(names)))
        write(ring, *given)

    monkeypatch.setattr(PyuringRing, "write", noted)
    writer.write(FileImage.of("file", [content(_SIZE)]), tmp_path)
    assert ("work", "write", "write", "start", "_submit", "write") in seen
    assert max(map(len, seen)) == 6  # `_start` is the seventh
