"""aiofiles: awaited, cancelled, and refused where it cannot work."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiofiles.threadpool.binary import AsyncFileIO

from iobench.errors import TransferError, UsageError
from iobench.testing import Footprint, content
from iobench.units import KIB
from iobench.writers.aio.tasks import finish_first, run_tasks
from iobench.writers.aiofiles import AiofilesWriter
from iobench.writers.blocks.workers import Blocks
from iobench.writers.image import FileImage
from iobench.writers.transfer import Meter

_DATA = content(20 * 64 * KIB + 5)


@pytest.fixture
def writer() -> AiofilesWriter:
    """Small blocks, several in flight."""
    return AiofilesWriter(block_size=64 * KIB, iodepth=3, files=3)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    with Footprint.unchanged():
        return asyncio.run(work)


def test_several_files_in_flight(writer: AiofilesWriter, tmp_path: Path) -> None:
    """Asynchronous code writes and reads several files at once by one writer."""

    async def work() -> None:
        images = [FileImage.of(f"new/{n}", [np.roll(_DATA, n)]) for n in range(5)]
        moved = await asyncio.gather(*(writer.awrite(image, tmp_path) for image in images))
        assert all(one.durable and one.bytes == len(_DATA) for one in moved)
        assert {tuple(one.paths) for one in moved} == {("aiofiles",)}
        into = [FileImage.of(image.path, [np.zeros_like(_DATA)]) for image in images]
        await asyncio.gather(*(writer.aread(image, tmp_path) for image in into))
        for image, back in zip(images, into, strict=True):
            assert np.array_equal(image.views(0, 99)[0], back.views(0, 99)[0])
            assert (tmp_path / image.path).read_bytes() == back.views(0, len(_DATA))[0].tobytes()

    _run(work())


def test_many(writer: AiofilesWriter, tmp_path: Path) -> None:
    """write_many and awrite_many write every file, and return one Transfer for all."""
    images = [FileImage.of(f"d/{n}", [content(1000 * n)]) for n in range(10)]
    for moved in (
        writer.write_many(images, tmp_path / "sync"),
        _run(writer.awrite_many(images, tmp_path / "async")),
    ):
        assert (moved.files, moved.bytes) == (10, 45_000)
    for where in ("sync", "async"):
        found = {path.name: path.stat().st_size for path in (tmp_path / where / "d").iterdir()}
        assert found == {str(n): 1000 * n for n in range(10)}
    assert writer.write_many([], tmp_path).files == 0


def test_where_a_loop_is_running(writer: AiofilesWriter, tmp_path: Path) -> None:
    """The ordinary methods would block a running loop: they raise, and name the alternative."""
    image = FileImage.of("file", [bytearray(10)])
    writer.write(image, tmp_path)
    stream = writer.open(tmp_path / "stream")

    async def work() -> None:
        for call, instead in (
            (lambda: writer.write(image, tmp_path), "awrite"),
            (lambda: writer.write_many([image], tmp_path), "awrite_many"),
            (lambda: writer.read(image, tmp_path), "aread"),
            (lambda: writer.open(tmp_path / "new"), "awrite"),
            (lambda: stream.write(_DATA), "awrite"),
        ):
            with pytest.raises(UsageError, match=instead):
                call()
        stream.abort()

    asyncio.run(work())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class _Held:
    """Holds the `nth` write of aiofiles in its thread until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.ended = False
        real, count = AsyncFileIO.write, [0]

        async def write(handle: Any, data: Any) -> int:
            number, count[0] = count[0], count[0] + 1
            if number != nth:
                return await real(handle, data)

            def held() -> int:
                self.begun.set()
                assert self.go.wait(10)
                done = handle._file.write(data)
                self.ended = True
                return done

            return await asyncio.get_running_loop().run_in_executor(None, held)

        monkeypatch.setattr(AsyncFileIO, "write", write)


@pytest.mark.parametrize("nth", [0, 7, 19])
@pytest.mark.parametrize("times", [1, 3])
def test_cancelled(
    writer: AiofilesWriter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nth: int,
    times: int,
) -> None:
    """A cancelled write waits for the block in flight, and then leaves no file; also after a second
    cancellation."""
    (tmp_path / "file").write_bytes(b"the last good one")
    with monkeypatch.context() as patch:
        held = _Held(patch, nth)

        async def work() -> None:
            task = asyncio.create_task(writer.awrite(FileImage.of("file", [_DATA]), tmp_path))
            await asyncio.to_thread(held.begun.wait, 10)
            for _ in range(times):
                task.cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            assert not task.done()
            held.go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert held.ended

        _run(work())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"the last good one"
    writer.write(FileImage.of("file", [_DATA]), tmp_path)
    assert (tmp_path / "file").read_bytes() == _DATA.tobytes()


def test_a_timeout_is_a_cancellation(
    writer: AiofilesWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio.timeout ends a write that hangs once its thread has ended the call."""
    held = _Held(monkeypatch, 2)

    async def work() -> None:
        writing = writer.awrite(FileImage.of("file", [_DATA]), tmp_path)
        asyncio.get_running_loop().call_soon(held.go.set)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writing, 0.001)

    _run(work())
    assert list(tmp_path.iterdir()) == []


def test_a_cancelled_read(
    writer: AiofilesWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that is cancelled at once leaves no descriptor open."""
    writer.write(FileImage.of("file", [_DATA]), tmp_path)

    async def work() -> None:
        back = FileImage.of("file", [np.zeros_like(_DATA)])
        for waits in range(12):
            task = asyncio.create_task(writer.aread(back, tmp_path))
            for _ in range(waits):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    _run(work())


def test_one_of_many_fails(
    writer: AiofilesWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure ends the others and is raised unchanged, with later ones as notes."""
    real = AsyncFileIO.write

    async def write(handle: Any, data: Any) -> int:
        if len(data) == 3000:
            raise OSError(errno.EIO, "I/O error")
        return await real(handle, data)

    monkeypatch.setattr(AsyncFileIO, "write", write)
    images = [FileImage.of(f"{n}", [content(1000 * n)]) for n in range(1, 7)]
    with pytest.raises(TransferError) as caught:
        _run(writer.awrite_many(images, tmp_path))
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(tmp_path / "3")
    for path in tmp_path.iterdir():
        assert path.name != "3"
        assert path.stat().st_size == 1000 * int(path.name)


def test_impatience_while_a_stream_ends(
    writer: AiofilesWriter,
    tmp_path: Path,
    impatience: Callable[[threading.Event], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C is raised after the loop and its threads have ended, and nothing is open."""
    go_on, close = threading.Event(), asyncio.Runner.close
    ended: list[asyncio.Runner] = []

    def slow(runner: asyncio.Runner) -> None:
        go_on.wait(10)
        close(runner)
        ended.append(runner)

    monkeypatch.setattr(asyncio.Runner, "close", slow)
    with Footprint.unchanged():
        stream = writer.open(tmp_path / "file")
        stream.write(_DATA)
        with impatience(go_on):
            stream.close()
        assert len(ended) == 1


def test_finish_first_undoes() -> None:
    """A result that arrives during the cancellation is passed to `undo`."""
    undone: list[str] = []

    async def work() -> None:
        let = asyncio.Event()

        async def make() -> str:
            await let.wait()
            return "made"

        task = asyncio.create_task(finish_first(make(), undone.append))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        let.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert undone == ["made"]


def test_run_tasks_counts_all() -> None:
    """Each block is taken once, by any of the tasks, and their meters are added."""
    meter, seen = Meter(), []

    async def work(blocks: Blocks, own: Meter) -> None:
        for start, stop in blocks:
            await asyncio.sleep(0)
            seen.append((start, stop))
            own.count("path", stop - start)

    asyncio.run(run_tasks(3, Blocks(0, 1001, 100), work, meter))
    assert sorted(seen) == [(start, min(start + 100, 1001)) for start in range(0, 1001, 100)]
    assert meter.paths["path"].bytes == 1001
