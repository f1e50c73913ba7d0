"""Parallel tasks in an event loop, and awaited calls that finish before a cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from iobench.errors import UsageError
from iobench.writers.blocks.workers import Blocks
from iobench.writers.transfer import Meter

__all__ = ["finish_first", "in_thread", "refuse_running_loop", "run_tasks"]

_T = TypeVar("_T")


async def finish_first(work: Awaitable[_T], undo: Callable[[_T], object] | None = None) -> _T:
    """Await `work`. A cancellation is raised only after `work` has ended.

    A thread that reads or writes cannot be stopped, and it uses the memory and the descriptor until
    it returns. After a cancellation, `undo` gets the result.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled() and task.exception() is None and undo is not None:
        undo(task.result())
    raise cancelled


async def in_thread(call: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
    """Run `call()` in the loop's executor. Cancellation works like in `finish_first`."""
    return await finish_first(asyncio.get_running_loop().run_in_executor(None, call), undo)


async def run_tasks(
    tasks: int,
    blocks: Blocks,
    work: Callable[[Blocks, Meter], Coroutine[Any, Any, None]],
    meter: Meter,
) -> None:
    """Run `work(blocks, own_meter)` in `tasks` tasks, or fewer if there are fewer blocks.

    Returns when all have ended. After the first failure or a cancellation, no more blocks are
    handed out. It is raised at the end; further failures are its notes. `run_workers` does the same
    with threads.
    """
    meters = [Meter() for _ in range(min(tasks, blocks.count))]
    running = {asyncio.create_task(work(blocks, own)) for own in meters}
    failures: list[BaseException] = []
    began_s = time.perf_counter()
    try:
        while running:
            try:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            except asyncio.CancelledError as error:
                failures.insert(0, error)
                blocks.cancel()
                continue
            for task in done:
                error_ = asyncio.CancelledError() if task.cancelled() else task.exception()
                if error_ is not None:
                    failures.append(error_)
                    blocks.cancel()
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"another task failed too: {other!r}")
            raise failures[0]
    finally:
        failures.clear()  # a traceback refers to this frame, which is a reference cycle
    meter.absorb(meters, time.perf_counter() - began_s)


def refuse_running_loop(instead: str) -> None:
    """Raise UsageError if this thread runs an event loop, because waiting would block it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(f"this would block the running event loop; use `{instead}` here")
