"""The `aiofiles` writer: reads and writes with asyncio, like many Python services."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from aiofiles.threadpool import wrap

from iobench.errors import DataMismatchError, UsageError, transfer_errors
from iobench.units import GIB, KIB, MIB
from iobench.writers.base import Availability
from iobench.writers.blocks.workers import Blocks
from iobench.writers.image import Bytes, FileImage, Ranges
from iobench.writers.local.new_file import NewFile, try_directory
from iobench.writers.local.posix import PosixWriter
from iobench.writers.options import AiofilesValues, WriterOptions, option
from iobench.writers.stream import BlockStream, PlainSink
from iobench.writers.transfer import Meter


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


class AiofilesWriter(PosixWriter):
    """Reads and writes through aiofiles: each call runs in the event loop's thread pool.

    Every operation runs an event loop of its own, so it raises UsageError in a thread that already
    runs one: call `await asyncio.to_thread(writer.write, image, target)` there.
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

    def _send(self, file: NewFile, image: FileImage, meter: Meter) -> None:
        _run(lambda calls: self._write(file, image, meter, calls), meter)

    def _receive(self, fd: int, image: FileImage, ranges: Ranges, meter: Meter) -> None:
        path = f"/proc/self/fd/{fd}"
        _run(lambda calls: self._in_blocks(path, "rb", image, ranges, meter, calls), meter)

    def _stream(self, file: NewFile, meter: Meter, size: int | None) -> BlockStream:  # noqa: ARG002
        raw = FileIO(file.fd, "r+b", closefd=False)

        def write(views: list[Bytes], offset: int) -> None:
            _run(lambda calls: _move(calls, "write", raw, views[0], offset, meter), Meter())

        return BlockStream(file, self.name, meter, PlainSink(write, self.options.block_size))

    def _write_batch(
        self,
        images: Sequence[FileImage],
        target: str | Path,
        unpublished: list[NewFile],
        meter: Meter,
    ) -> None:
        """Write the option `files` files at once."""

        async def write(calls: ThreadPoolExecutor) -> None:
            async def work(numbers: Blocks, own: Meter) -> None:
                for number, _ in numbers:
                    image = images[number]
                    path = os.path.join(target, image.path)
                    with transfer_errors("writing", path):
                        file = NewFile(path, own)
                        unpublished.append(file)
                        self._reserve(file, image.size_bytes)
                        with self._reachable(image, own) as reachable:
                            await self._write(file, reachable, own, calls)
                        file.set_size(image.size_bytes)
                        file.meter = meter  # `own` is absorbed before the file is published

            await _in_tasks(self.options.files, Blocks([(0, len(images))], 1), work, meter)

        _run(write, meter)

    async def _write(
        self, file: NewFile, image: FileImage, meter: Meter, calls: ThreadPoolExecutor
    ) -> None:
        await self._in_blocks(file.part, "r+b", image, [(0, image.size_bytes)], meter, calls)

    async def _in_blocks(
        self,
        path: str,
        mode: str,
        image: FileImage,
        ranges: Ranges,
        meter: Meter,
        calls: ThreadPoolExecutor,
    ) -> None:
        """Read (`rb`) or write each block of the ranges; each task has a handle."""

        async def work(blocks: Blocks, own: Meter) -> None:
            with FileIO(path, mode) as raw:
                for start, stop in blocks:
                    if mode == "rb":
                        with image.incoming(start, stop, own) as views:
                            one = len(views) == 1
                            block = views[0] if one else np.empty(stop - start, dtype=np.uint8)
                            await _move(calls, "read", raw, block, start, own)
                            if not one:
                                with own.phase("scatter"):
                                    image.scatter(start, stop, block)
                        image.filled(start, stop)
                        continue
                    with image.outgoing(start, stop, own) as views:
                        data = views[0] if len(views) == 1 else np.concatenate(views)
                        await _move(calls, "write", raw, data, start, own)

        blocks = Blocks(ranges, self.options.block_size)
        await _in_tasks(self.options.iodepth, blocks, work, meter)


async def _move(
    calls: ThreadPoolExecutor, doing: str, raw: FileIO, data: Bytes, offset: int, meter: Meter
) -> None:
    """Write or read all of `data` at `offset` of an unbuffered file."""
    name, done, count = "write" if doing == "write" else "readinto", 0, 0
    with meter.operation(doing):
        await _call(calls, raw, "seek", offset)
        while done < len(data):
            moved = await _call(calls, raw, name, data[done:].data)
            count += 1
            if not moved and doing == "read":
                raise DataMismatchError(f"the file ended at {offset + done} while being read")
            done += moved
    meter.count("aiofiles", len(data), count)


def _run(work: Callable[[ThreadPoolExecutor], Coroutine[Any, Any, None]], meter: Meter) -> None:
    """Run `work(calls)` in a loop of its own. On return no thread of `calls` is left.

    The phase `threads` of `meter` has the time for both. Raises UsageError if this thread runs a
    loop, because waiting would block it.
    """
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise UsageError(
            "this would block the running event loop; use "
            "`await asyncio.to_thread(writer.write, image, target)` here"
        )
    began_s = time.perf_counter()
    with (
        ThreadPoolExecutor(thread_name_prefix="iobench-asyncio") as calls,
        asyncio.Runner() as runner,
    ):
        loop_s = time.perf_counter()
        runner.run(work(calls))
        ended_s = time.perf_counter()
    passed_s = loop_s - began_s + time.perf_counter() - ended_s
    meter.seconds["threads"] = meter.seconds.get("threads", 0.0) + passed_s


async def _call(calls: ThreadPoolExecutor, raw: FileIO, name: str, argument: Any) -> int:
    """Call a method of an unbuffered file through aiofiles, in a thread of `calls`.

    A cancellation is raised only after it has ended: a thread that reads or writes cannot be
    stopped, and it uses the memory and the descriptor until it returns. Executors refuse calls once
    the script has ended. The call is made here then, so that a save in the background is finished.
    """
    task = asyncio.ensure_future(getattr(wrap(raw, executor=calls), name)(argument))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    try:
        count: int = task.result()
    except RuntimeError as error:
        if "cannot schedule new futures" not in str(error):
            raise
        count = getattr(raw, name)(argument)
    return count


async def _in_tasks(
    tasks: int,
    blocks: Blocks,
    work: Callable[[Blocks, Meter], Coroutine[Any, Any, None]],
    meter: Meter,
) -> None:
    """Run `work(blocks, meter)` in `tasks` tasks; like `run_workers`, which has threads."""
    meters = [Meter() for _ in range(min(tasks, blocks.count))]
    began_s = time.perf_counter()

    async def run(own: Meter) -> None:
        try:
            await work(blocks, own)
        except BaseException:
            blocks.cancel()
            raise

    # Not a TaskGroup: it leaves an error behind that no task retrieves if Ctrl-C is raised in one.
    ended = await asyncio.gather(*map(run, meters), return_exceptions=True)
    failures = [one for one in ended if one is not None]
    try:
        for other in failures[1:]:
            failures[0].add_note(f"another task failed too: {other!r}")
        if failures:
            raise failures[0]
    finally:
        del ended, failures  # a traceback refers to this frame, which is a reference cycle
    meter.absorb(meters, time.perf_counter() - began_s)
