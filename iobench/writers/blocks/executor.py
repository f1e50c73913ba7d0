"""An executor and an event loop that still work while the interpreter ends.

After the last line of the script, `ThreadPoolExecutor.submit` raises RuntimeError, also for saves
that still run in the background. asyncio uses a ThreadPoolExecutor for its calls in threads.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar, TypeVarTuple

from iobench.writers.blocks.channel import Channel, Lease

__all__ = ["OwnLoop", "WorkerExecutor"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class WorkerExecutor(Executor):
    """Runs calls in up to `threads` threads, or in the caller if none can start.

    The threads are daemons: an executor that is never shut down does not block the end of the
    interpreter.
    """

    def __init__(self, threads: int, name: str) -> None:
        channel: Channel[Callable[[], None]] = Channel(
            lambda: channel.serve(lambda call: call()),
            name=name,
            workers=threads,
            limit=sys.maxsize,
        )
        self._channel = channel

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 -- raised by Future.result
                future.set_exception(error)
            else:
                future.set_result(result)

        try:
            self._channel.submit(Lease(call))
        except RuntimeError as error:
            if "interpreter shutdown" not in str(error):
                raise
            call()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for every call, whatever the arguments: each call uses memory or a descriptor."""
        del wait, cancel_futures
        self._channel.close()


class OwnLoop(asyncio.SelectorEventLoop):
    """An event loop that runs its calls in threads by a WorkerExecutor."""

    def __init__(self) -> None:
        super().__init__()
        self._own = WorkerExecutor(min(32, (os.cpu_count() or 1) + 4), "iobench-asyncio")

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        return super().run_in_executor(executor or self._own, func, *args)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        del timeout
        self._own.shutdown()
