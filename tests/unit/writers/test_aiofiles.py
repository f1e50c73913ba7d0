"""aiofiles: several files in flight, interrupted, and refused where it cannot work."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import errno
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiofiles.threadpool.binary import AsyncFileIO

from iobench.errors import TransferError, UsageError
from iobench.testing import Footprint, content
from iobench.units import KIB
from iobench.writers.aiofiles import AiofilesWriter
from iobench.writers.image import FileImage

_DATA = content(20 * 64 * KIB + 5)


@pytest.fixture
def writer() -> AiofilesWriter:
    """Small blocks, several in flight."""
    return AiofilesWriter(block_size=64 * KIB, iodepth=3, files=3)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with Footprint.unchanged():
        yield


def _image() -> FileImage:
    return FileImage.of("file", [_DATA])


def test_many(writer: AiofilesWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many files as the option says are in flight, and one Transfer counts all."""
    real, now, most = AsyncFileIO.write, set[Any](), 0

    async def write(handle: Any, data: Any) -> int:
        nonlocal most
        now.add(handle)
        most = max(most, len(now))
        await asyncio.sleep(0.001)
        count = await real(handle, data)
        now.discard(handle)
        return count

    monkeypatch.setattr(AsyncFileIO, "write", write)
    images = [FileImage.of(f"d/{n}", [content(1000 * n)]) for n in range(10)]
    moved = writer.write_many(images, tmp_path)
    assert (moved.files, moved.bytes) == (10, 45_000)
    found = {path.name: path.stat().st_size for path in (tmp_path / "d").iterdir()}
    assert found == {str(n): 1000 * n for n in range(10)}
    assert most == 3
    assert writer.write_many([], tmp_path).files == 0


def test_where_a_loop_is_running(writer: AiofilesWriter, tmp_path: Path) -> None:
    """It would block a running loop: it raises, and names the alternative, which works."""
    writer.write(_image(), tmp_path)
    stream = writer.open(tmp_path / "stream")

    async def work() -> None:
        for call in (
            lambda: writer.write(_image(), tmp_path),
            lambda: writer.write_many([_image()], tmp_path),
            lambda: writer.read(FileImage.of("file", [np.zeros_like(_DATA)]), tmp_path),
            lambda: stream.write(content(2 << 20)),
        ):
            with pytest.raises(UsageError, match="to_thread"):
                call()
        stream.abort()
        moved = await asyncio.to_thread(writer.write, _image(), tmp_path)
        assert moved.bytes == len(_DATA)

    asyncio.run(work())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("nth", [0, 7, 19])
def test_ctrl_c(
    writer: AiofilesWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """It waits for the blocks in flight, whose memory is in use, and then leaves no file."""
    (tmp_path / "file").write_bytes(b"the last good one")
    real, count, ended = AsyncFileIO.write, iter(range(1000)), []

    async def write(handle: Any, data: Any) -> int:
        if next(count) != nth:
            return await real(handle, data)
        go = threading.Event()

        def held() -> int:
            assert go.wait(10)
            done: int = handle._file.write(data)
            ended.append(nth)
            return done

        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(None, held)
        loop.call_later(0.01, go.set)
        signal.raise_signal(signal.SIGINT)
        return await writing

    with monkeypatch.context() as patch:
        patch.setattr(AsyncFileIO, "write", write)
        with pytest.raises(KeyboardInterrupt):
            writer.write(_image(), tmp_path)
    assert ended == [nth]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"the last good one"
    writer.write(_image(), tmp_path)
    assert (tmp_path / "file").read_bytes() == _DATA.tobytes()


def test_one_of_many_fails(
    writer: AiofilesWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure ends the others, and its error names the file; nothing is published."""
    real = AsyncFileIO.write

    async def write(handle: Any, data: Any) -> int:
        if len(data) == 3000:
            raise OSError(errno.EIO, "I/O error")
        return await real(handle, data)

    monkeypatch.setattr(AsyncFileIO, "write", write)
    images = [FileImage.of(f"{n}", [content(1000 * n)]) for n in range(1, 7)]
    with pytest.raises(TransferError) as caught:
        writer.write_many(images, tmp_path)
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(tmp_path / "3")
    assert list(tmp_path.iterdir()) == []


def test_after_the_last_line_of_the_script(
    writer: AiofilesWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors refuse calls then: the loop makes them itself."""
    with monkeypatch.context() as patch:
        patch.setattr(concurrent.futures.thread, "_shutdown", True)
        writer.write(_image(), tmp_path)
    assert (tmp_path / "file").read_bytes() == _DATA.tobytes()
