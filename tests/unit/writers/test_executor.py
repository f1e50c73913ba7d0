"""WorkerExecutor and OwnLoop: calls in threads, or without threads while the interpreter ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest

from iobench.testing import Footprint
from iobench.writers.blocks import interrupt_safe
from iobench.writers.blocks.executor import OwnLoop, WorkerExecutor
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.transfer import Meter


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread starts, as at the end of CPython 3.12.0 to 3.12.2."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(interrupt_safe.Worker, "start", refuse)


def _fail() -> None:
    raise ValueError("the call's")


def test_calls() -> None:
    """At most `threads` calls run at once; futures hold results and errors."""
    here, go = threading.Semaphore(0), threading.Event()

    def call(number: int) -> int:
        here.release()
        assert go.wait(10)
        return number

    with Footprint.unchanged(), WorkerExecutor(2, "test") as executor:
        futures = [executor.submit(call, number) for number in range(5)]
        failing, cancelled = executor.submit(_fail), executor.submit(call, 9)
        assert cancelled.cancel()
        assert [here.acquire(timeout=10) for _ in range(2)] == [True, True]
        assert not here.acquire(blocking=False)
        assert sum(thread.name == "test" for thread in threading.enumerate()) == 2
        go.set()
        assert [future.result(10) for future in futures] == list(range(5))
        with pytest.raises(ValueError, match="the call's"):
            failing.result(10)
        with pytest.raises(CancelledError):
            cancelled.result()
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(_fail)


def test_an_idle_thread_is_taken_first() -> None:
    """Sequential calls need one thread."""
    with WorkerExecutor(8, "test") as executor:
        for _ in range(3):
            executor.submit(int).result(10)
            executor._channel.drain()
        assert len(executor._channel._threads) == 1


@pytest.mark.usefixtures("ended")
def test_without_threads() -> None:
    """The caller makes the calls of an executor and of a loop, and does the work of workers."""
    here = threading.current_thread()
    with WorkerExecutor(2, "test") as executor:
        assert executor.submit(threading.current_thread).result(0) is here
        assert isinstance(executor.submit(_fail).exception(0), ValueError)
    with asyncio.Runner(loop_factory=OwnLoop) as runner:
        assert runner.run(asyncio.to_thread(threading.current_thread)) is here
    for caller_waits in (True, False):
        found: list[int] = []

        def work(blocks: Blocks, _: Meter, found: list[int] = found) -> None:
            found += [start for start, _ in blocks]

        run_workers(3, Blocks(0, 5, 1), work, Meter(), caller_waits=caller_waits)
        assert found == list(range(5))


def test_too_few_threads_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that does not start is an error, except at the end of the interpreter."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(interrupt_safe.Worker, "start", refuse)
    with WorkerExecutor(2, "test") as executor, pytest.raises(RuntimeError, match="can't start"):
        executor.submit(int)


def test_a_loop_leaves_nothing() -> None:
    """Its threads have ended when the runner is closed."""

    async def call(make: Callable[[], int]) -> list[int]:
        return await asyncio.gather(*(asyncio.to_thread(make) for _ in range(4)))

    with Footprint.unchanged(), asyncio.Runner(loop_factory=OwnLoop) as runner:
        assert runner.run(call(int)) == [0] * 4
