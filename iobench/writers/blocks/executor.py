"""An executor and an event loop that still work while the interpreter ends.

After the last line of the script, `ThreadPoolExecutor.submit` raises RuntimeError, also for saves
that still run in the background. asyncio uses a ThreadPoolExecutor for its calls in threads.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar, TypeVarTuple

from iobench.writers.blocks.interrupt_safe import Worker, end_workers, start_workers

__all__ = ["OwnLoop", "WorkerExecutor"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class WorkerExecutor(Executor):
    """Runs calls in up to `threads` Workers, or in the caller if none can start.

    Used by one thread. The workers are daemons: an executor that is never shut down does not block
    the end of the interpreter.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads, self._name = threads, name
        self._workers: list[Worker] = []
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._is_shut_down = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        if self._is_shut_down:
            raise RuntimeError("the executor is shut down")
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

        if self._idle.acquire(blocking=False) or self._start_worker():
            self._calls.put(call)
        else:
            call()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for every call, whatever the arguments: each call uses memory or a descriptor."""
        del wait, cancel_futures
        self._is_shut_down = True
        end_workers(self._workers, self._calls)

    def _start_worker(self) -> bool:
        """Start a worker unless `threads` run; return whether there is any."""
        if len(self._workers) < self._threads:
            worker = Worker(
                target=_work, args=(self._calls, self._idle), name=self._name, daemon=True
            )
            self._workers += start_workers([worker])
        return bool(self._workers)


def _work(calls: SimpleQueue[Callable[[], None] | None], idle: threading.Semaphore) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it holds the result
        idle.release()


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
