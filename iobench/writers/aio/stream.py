"""AiofilesStream: a synchronous stream that writes through aiofiles in its own event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from aiofiles.threadpool import wrap

from iobench.writers.aio.tasks import finish_first, refuse_running_loop
from iobench.writers.blocks.executor import OwnLoop
from iobench.writers.blocks.interrupt_safe import Worker, start_workers, uninterrupted
from iobench.writers.image import Bytes
from iobench.writers.local.new_file import NewFile
from iobench.writers.local.page_cache import CachedStream
from iobench.writers.transfer import Meter

__all__ = ["AiofilesStream", "write_all"]


async def write_all(handle: Any, data: Bytes, offset: int) -> int:
    """Write all of `data` at `offset` of an unbuffered aiofiles handle. Return the write calls."""
    calls = 0
    await finish_first(handle.seek(offset))
    left = data.data
    while len(left):
        count = await finish_first(handle.write(left))
        calls += 1
        left = left[count:]
    return calls


class _AsyncSink:
    """A sink that awaits each write. The event loop starts with the first write."""

    def __init__(self, file: NewFile) -> None:
        self._raw = open(file.part, "r+b", buffering=0)  # noqa: SIM115 -- closed by `close`
        self._runner = asyncio.Runner(loop_factory=OwnLoop)

    def write(self, views: list[Bytes], offset: int, meter: Meter) -> None:
        refuse_running_loop("await writer.awrite(image, target)")
        with meter.operation("write"):
            for view in views:
                calls = self._runner.run(self._write(view, offset))
                meter.count("aiofiles", len(view), calls)
                offset += len(view)

    async def _write(self, view: Bytes, offset: int) -> int:
        return await write_all(wrap(self._raw), view, offset)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        """End the event loop and its threads. Callable from any thread and from a running loop."""
        # asyncio allows one running loop per thread, and the caller may be in one.
        closing = Worker(target=self._runner.close)
        try:
            if start_workers([closing]):
                uninterrupted(closing.join)
            else:
                self._runner.close()
        finally:
            self._raw.close()


class AiofilesStream(CachedStream):
    """A stream that collects small writes in a block and awaits large writes one by one."""

    def __init__(self, file: NewFile, writer: str, meter: Meter, block_size: int) -> None:
        self._async_sink = _AsyncSink(file)
        super().__init__(file, writer, meter, self._async_sink, block_size)

    def _release(self) -> None:
        super()._release()
        self._async_sink.close()
