"""An executor and an event loop that an ending interpreter does not refuse.

From the script's last line on `ThreadPoolExecutor.submit` raises RuntimeError, in saves too that
were begun before and go on in the background. asyncio's calls in threads need it as well.
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
    """Up to `threads` Workers; without any the caller makes the call. Used by one thread.

    The workers are daemons: an executor that is never shut down does not hold the interpreter.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads, self._name = threads, name
        self._workers: list[Worker] = []
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._down = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        if self._down:
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

        if self._idle.acquire(blocking=False) or self._hire():
            self._calls.put(call)
        else:
            call()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits for every call, whatever is asked for: each is somebody's memory or descriptor."""
        del wait, cancel_futures
        self._down = True
        end_workers(self._workers, self._calls)

    def _hire(self) -> bool:
        """Whether there is a worker: one more, below the limit."""
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
    """An event loop whose calls in threads are made by Workers."""

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
