"""The `aiofiles` writer: reads and writes with asyncio, like many Python services."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import aiofiles
import numpy as np

from iobench.errors import DataMismatchError, transfer_errors
from iobench.units import GIB, KIB, MIB
from iobench.writers.aio.stream import AiofilesStream, write_all
from iobench.writers.aio.tasks import finish_first, in_thread, refuse_running_loop, run_tasks
from iobench.writers.availability import Availability
from iobench.writers.base import Writer
from iobench.writers.blocks.executor import OwnLoop
from iobench.writers.blocks.workers import Blocks
from iobench.writers.device.staging import staged
from iobench.writers.image import Bytes, FileImage, in_batches
from iobench.writers.local.new_file import NewFile, open_source, sync_directory, try_directory
from iobench.writers.options import WriterOptions, option
from iobench.writers.stream import Stream
from iobench.writers.transfer import Meter, Transfer

if TYPE_CHECKING:
    from iobench.writers.typed import AiofilesValues

__all__ = ["AiofilesOptions", "AiofilesWriter"]

_sync_names = sync_directory
_TOGETHER = 1024  # images in memory in awrite_many


@dataclass(frozen=True, kw_only=True)
class AiofilesOptions(WriterOptions):
    """Options of `aiofiles`."""

    block_size: int = option(
        4 * MIB,
        unit="bytes",
        low=4 * KIB,
        high=GIB,
        search=(MIB, 4 * MIB, 16 * MIB),
        help="bytes of one awaited read or write",
    )
    iodepth: int = option(
        2, low=1, high=256, search=(1, 2, 4), help="blocks of one file in flight, one handle each"
    )
    files: int = option(4, low=1, high=256, search=(1, 4, 16), help="files in flight in write_many")
    fallocate: bool = option(False, search=(False, True), help="reserve the space before writing")


class AiofilesWriter(Writer):
    """Reads and writes through aiofiles: each call runs in the event loop's thread pool.

    Asynchronous code calls `awrite`, `awrite_many` and `aread`. The ordinary methods run their own
    event loop, and raise UsageError if the calling thread already runs one.
    """

    name = "aiofiles"
    summary = "asyncio with aiofiles, through the page cache: how many Python services write"
    Options = AiofilesOptions
    options: AiofilesOptions

    if TYPE_CHECKING:

        def __init__(
            self, options: AiofilesOptions | None = None, **values: Unpack[AiofilesValues]
        ) -> None: ...

    def available(self, target: str | Path = ".") -> Availability:
        return try_directory(target)

    async def awrite(
        self,
        image: FileImage,
        target: str | Path,
        *,
        durable: bool = True,
        sync_directory: bool = True,
    ) -> Transfer:
        """Like `write`, but awaitable.

        When cancelled, it first waits for the blocks in flight, because their memory is in use. It
        then removes the new file and raises CancelledError. Once the rename has begun, the whole
        file is published.
        """
        self.check_scheme(target)
        meter = self._meter()
        await self._awrite(image, target, durable, durable and sync_directory, meter)
        return meter.transfer(self.name, "write", image.size_bytes, durable=durable)

    async def awrite_many(
        self,
        images: Iterable[FileImage],
        target: str | Path,
        *,
        durable: bool = True,
        sync_directory: bool = True,
    ) -> Transfer:
        """Like `write_many`, but awaitable, with the option `files` as the files in flight."""
        self.check_scheme(target)
        meter = self._meter()
        names: dict[str, None] = {}
        files = size = 0

        async def work(numbers: Blocks, own: Meter) -> None:
            for number, _ in numbers:
                changed = await self._awrite(batch[number], target, durable, False, own)
                names.update(dict.fromkeys(changed))

        for batch in in_batches(images, _TOGETHER):
            await run_tasks(self.options.files, Blocks(0, len(batch), 1), work, meter)
            files, size = files + len(batch), size + sum(one.size_bytes for one in batch)
        if durable and sync_directory:
            with meter.phase("commit"), transfer_errors("publishing in", target):
                for directory in names:
                    await in_thread(functools.partial(_sync_names, directory))
        return meter.transfer(self.name, "write", size, durable=durable, files=files)

    async def aread(
        self, image: FileImage, target: str | Path, *, start: int = 0, stop: int | None = None
    ) -> Transfer:
        """Like `read`, but awaitable. When cancelled, it first waits for the blocks in flight."""
        self.check_scheme(target)
        meter = self._meter()
        start, stop = self._range_to_fill(image, start, stop)
        path = os.path.join(target, image.path)
        with transfer_errors("reading", path):
            with meter.phase("open"):
                opening = functools.partial(open_source, path, 0, image.size_bytes)
                fd = await in_thread(opening, os.close)
            try:
                with staged(image, meter) as within:
                    await self._areceive(fd, within, start, stop, meter)
            finally:
                os.close(fd)
        return meter.transfer(self.name, "read", stop - start, durable=True)

    def write(
        self,
        image: FileImage,
        target: str | Path,
        *,
        durable: bool = True,
        sync_directory: bool = True,
    ) -> Transfer:
        refuse_running_loop("await writer.awrite(image, target)")
        how = {"durable": durable, "sync_directory": sync_directory}
        return _run(self.awrite(image, target, **how))

    def write_many(
        self,
        images: Iterable[FileImage],
        target: str | Path,
        *,
        durable: bool = True,
        sync_directory: bool = True,
    ) -> Transfer:
        refuse_running_loop("await writer.awrite_many(images, target)")
        how = {"durable": durable, "sync_directory": sync_directory}
        return _run(self.awrite_many(images, target, **how))

    def read(
        self, image: FileImage, target: str | Path, *, start: int = 0, stop: int | None = None
    ) -> Transfer:
        refuse_running_loop("await writer.aread(image, target)")
        return _run(self.aread(image, target, start=start, stop=stop))

    def open(self, target: str | Path, size: int | None = None) -> Stream:
        refuse_running_loop("await writer.awrite(image, target)")
        meter = self._meter()
        with transfer_errors("opening", target):
            file = NewFile(target, 0, meter)
            try:
                if size and self.options.fallocate:
                    file.reserve(0, size)
                return AiofilesStream(file, self.name, meter, self.options.block_size)
            except BaseException:
                file.abandon()
                raise

    async def _awrite(
        self, image: FileImage, target: str | Path, durable: bool, sync_names: bool, meter: Meter
    ) -> list[str]:
        """Write and publish one file. Return the directories that have a new entry."""
        path = os.path.join(target, image.path)
        with transfer_errors("writing", path):
            creating = functools.partial(NewFile, path, 0, meter)
            with await in_thread(creating, NewFile.abandon) as file:
                if self.options.fallocate:
                    await in_thread(functools.partial(file.reserve, 0, image.size_bytes))
                with staged(image, meter) as within:
                    await self._asend(file, within, meter)
                await in_thread(functools.partial(file.set_size, image.size_bytes))
                if durable:
                    await in_thread(file.sync)
                await in_thread(functools.partial(file.publish, sync_names=sync_names))
                return file.directories

    async def _asend(self, file: NewFile, image: FileImage, meter: Meter) -> None:
        async def work(blocks: Blocks, own: Meter) -> None:
            async with _handle(file.part, "r+b") as handle:
                for start, stop in blocks:
                    with contextlib.ExitStack() as held:
                        outgoing = image.outgoing(start, stop, own)
                        views = await _enter(held, outgoing, waits=image.on_device)
                        data = views[0] if len(views) == 1 else np.concatenate(views)
                        with own.operation("write"):
                            calls = await write_all(handle, data, start)
                    own.count("aiofiles", stop - start, calls)

        await self._run(0, image.size_bytes, work, meter)

    async def _areceive(
        self, fd: int, image: FileImage, start: int, stop: int, meter: Meter
    ) -> None:
        async def work(blocks: Blocks, own: Meter) -> None:
            async with _handle(f"/proc/self/fd/{fd}", "rb") as handle:
                for begin, end in blocks:
                    with contextlib.ExitStack() as held:
                        incoming = image.incoming(begin, end, own)
                        views = await _enter(held, incoming, waits=image.on_device)
                        await _read_block(handle, image, views, begin, end, own)
                    image.filled(begin, end)

        await self._run(start, stop, work, meter)

    async def _run(self, start: int, stop: int, work: Any, meter: Meter) -> None:
        blocks = Blocks(start, stop, self.options.block_size)
        await run_tasks(self.options.iodepth, blocks, work, meter)


def _run(moving: Coroutine[Any, Any, Transfer]) -> Transfer:
    with asyncio.Runner(loop_factory=OwnLoop) as runner:
        return runner.run(moving)


@asynccontextmanager
async def _handle(path: str, mode: Any) -> AsyncIterator[Any]:
    """Open an unbuffered handle. Tasks cannot share one, as seek and write are separate calls."""
    handle = await finish_first(
        aiofiles.open(path, mode, buffering=0), lambda opened: opened._file.close()
    )
    try:
        yield handle
    finally:
        await finish_first(handle.close())


async def _enter(
    held: contextlib.ExitStack, entering: AbstractContextManager[list[Bytes]], *, waits: bool
) -> list[Bytes]:
    """Enter a context manager, in a thread if it waits for a device."""
    if not waits:
        return held.enter_context(entering)
    return await in_thread(functools.partial(held.enter_context, entering))


async def _read_block(
    handle: Any, image: FileImage, views: list[Bytes], start: int, stop: int, meter: Meter
) -> None:
    block = views[0] if len(views) == 1 else np.empty(stop - start, dtype=np.uint8)
    done = calls = 0
    with meter.operation("read"):
        await finish_first(handle.seek(start))
        while done < len(block):
            count = await finish_first(handle.readinto(block[done:].data))
            calls += 1
            if not count:
                raise DataMismatchError(f"the file ended at {start + done} while being read")
            done += count
    if len(views) > 1:
        with meter.phase("scatter"):
            image.scatter(start, stop, block)
    meter.count("aiofiles", stop - start, calls)
