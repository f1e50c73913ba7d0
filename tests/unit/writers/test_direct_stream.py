"""BackgroundSink: space that it reserves ahead, and reservations that fail."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest

from iobench import linux
from iobench.errors import TransferError
from iobench.testing import Footprint, content
from iobench.units import GIB
from iobench.writers.direct import background, engine
from iobench.writers.odirect import ODirectWriter

_Impatience = Callable[[threading.Event], AbstractContextManager[None]]


@pytest.fixture
def writer(tmp_path: Path) -> ODirectWriter:
    """Blocks of one page, so that a small file has many."""
    writer = ODirectWriter(block_size=4096, threads=2)
    answer = writer.available(tmp_path)
    if not answer.ok:
        pytest.skip(answer.reason)
    return writer


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The reservations as (offset, length); no space is really reserved."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(linux, "fallocate", lambda _, *extent: seen.append(extent))
    return seen


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free bytes that the file system reports; enough, unless a test sets less."""
    found = [1 << 50]
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=found[0], f_frsize=1))
    return found


def test_reserves_in_steps(
    writer: ODirectWriter, tmp_path: Path, reserved: list, free: list, monkeypatch
) -> None:
    """When a block would pass the reserved space, the next step is reserved."""
    monkeypatch.setattr(background, "_RESERVE_STEP", 3 * 4096)
    with writer.open(tmp_path / "file") as stream:
        stream.write(content(8 * 4096 + 1))
    assert reserved == [(0, 3 * 4096), (3 * 4096, 3 * 4096), (6 * 4096, 3 * 4096)]
    assert (tmp_path / "file").read_bytes() == content(8 * 4096 + 1).tobytes()


@pytest.mark.parametrize(
    ("written", "size", "free_bytes", "expected"),
    [
        (10_000, 10_000, 1 << 50, [(0, 10_000)]),
        (4095, None, 1 << 50, []),
        (10_000, None, 4 * GIB - 1, []),
    ],
    ids=["announced", "less than a block", "nearly full"],
)
def test_what_reserves_nothing_ahead(
    writer: ODirectWriter,
    tmp_path: Path,
    reserved: list,
    free: list,
    written: int,
    size: int | None,
    free_bytes: int,
    expected: list,
) -> None:
    """What `open(size=...)` announces is reserved at once. A step could take all free space of a
    nearly full disk."""
    free[0] = free_bytes
    with writer.open(tmp_path / "file", size=size) as stream:
        stream.write(content(written))
    assert reserved == expected
    assert (tmp_path / "file").read_bytes() == content(written).tobytes()


def test_a_step_that_fails_is_given_back(
    writer: ODirectWriter, tmp_path: Path, free: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reservation that finds no space releases its blocks, and the stream continues."""

    def partly(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, offset + length // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(linux, "fallocate", partly)
    with writer.open(tmp_path / "file") as stream:
        stream.write(content(4096))
        (part,) = tmp_path.glob(".file.*")
        assert part.stat().st_size <= 4096
        stream.write(content(5000))
    assert (tmp_path / "file").stat().st_size == 9096


def test_other_failures_of_a_step_are_raised(
    writer: ODirectWriter, tmp_path: Path, free: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reservation that fails for another reason fails the stream."""

    def fail(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(linux, "fallocate", fail)
    stream = writer.open(tmp_path / "file")
    with pytest.raises(TransferError, match="I/O error"):
        stream.write(content(4096))
    stream.abort()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_hand_over_shares_no_block(
    writer: ODirectWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a block is handed over never puts one block into the pool twice."""
    stream = writer.open(tmp_path / "file")
    put = stream._sink.put

    def interrupted(block, offset: int) -> None:
        put(block, offset)
        raise KeyboardInterrupt

    monkeypatch.setattr(stream._sink, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.write(content(4096))
    stream.abort()
    addresses = [block.ctypes.data for block in writer._pool._free]
    assert len(set(addresses)) == len(addresses)


def test_repeated_ctrl_c_writes_to_no_other_file(
    writer: ODirectWriter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    impatience: _Impatience,
) -> None:
    """Repeated Ctrl-C during abort: threads never write to a reused descriptor number."""
    begun, ended = threading.Semaphore(0), threading.Semaphore(0)
    go_on = threading.Event()
    pwrite_all = engine.pwrite_all

    def late(*arguments, unit: int) -> int:
        begun.release()
        assert go_on.wait(10)
        try:
            return pwrite_all(*arguments, unit=unit)
        finally:
            ended.release()

    monkeypatch.setattr(engine, "pwrite_all", late)
    with Footprint.unchanged():
        stream = writer.open(tmp_path / "file")
        stream.write(content(3 * 4096))
        for _ in range(2):
            assert begun.acquire(timeout=10)
        number = stream._file.fd
        with impatience(go_on):
            stream.abort()
        other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
        go_on.set()
        for _ in range(2):
            assert ended.acquire(timeout=10)
        size = os.fstat(other).st_size
        os.close(other)
    assert other == number
    assert size == 0
    assert not begun.acquire(blocking=False)  # the third block was dropped
    assert os.listdir(tmp_path) == ["other"]
