"""Channel: after any interrupt no wait hangs, no permit is lost, the first failure is kept."""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.every_bytecode import SOON_S, Boom, Place, Tracer, at_every_place, within
from support.forked import in_child

from iobench.testing import Footprint
from iobench.writers.blocks import channel as module
from iobench.writers.blocks.channel import Channel, Lease, LeaseState, OnFull


@pytest.fixture(autouse=True)
def _nothing_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_lost", [])


class _Work:
    """A channel that records which items were handled and which were released."""

    def __init__(self, handle: Callable[[Any], object] = lambda _: None, **options: Any) -> None:
        self.handled: list[Any] = []
        self.released: Counter[Any] = Counter()
        self._handle = handle
        options = {"workers": 2, "limit": 2} | options
        self.channel = Channel[Any](
            lambda: self.channel.serve(self._note), name="test", release=self._release, **options
        )

    def _note(self, item: Any) -> None:
        self._handle(item)
        self.handled.append(item)

    def _release(self, item: Any) -> None:
        self.released[item] += 1


def test_every_lease_is_done_and_released() -> None:
    """After drain every item was handled and released once; after close no thread is left."""
    with Footprint.unchanged():
        work = _Work()
        work.channel.drain()
        assert not work.channel._threads  # they start with the first lease
        leases = [Lease(number) for number in range(20)]
        for lease in leases:
            work.channel.submit(lease)
            assert len(work.channel._outstanding) <= 2
        work.channel.drain()
        assert sorted(work.handled) == list(range(20))
        assert work.released == Counter(range(20))
        assert all(lease.state is LeaseState.DONE for lease in leases)
        work.channel.close()
        work.channel.close()
    with pytest.raises(RuntimeError, match="closed"):
        work.channel.submit(Lease(1))


def test_no_wait_depends_on_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change notifies; the timeout of a wait matters only after an interrupt."""
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 3600)

    def use() -> None:
        for lingers in (True, False):
            work = _Work(lingers=lingers, limit=1)
            leases = [Lease(number) for number in range(50)]
            for lease in leases:
                work.channel.submit(lease)
            work.channel.wait(leases[-1])
            work.channel.submit(Lease(50))
            work.channel.drain()
            work.channel.close()

    within(SOON_S, use)


def _newest(queued: list[Lease[int]]) -> list[Lease[int]]:
    return queued[-1:]


class _Gated(_Work):
    """One worker, which waits before each item until `go_on` is released."""

    def __init__(self, **options: Any) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        super().__init__(self._wait, **{"workers": 1, "limit": 3} | options)

    def _wait(self, _: object) -> None:
        self.begun.release()
        assert self.go_on.acquire(timeout=SOON_S)

    def submitted(self, numbers: range) -> list[Lease[int]]:
        """Submit leases; the first one is RUNNING on return."""
        leases = [Lease(number) for number in numbers]
        self.channel.submit(leases[0])
        assert self.begun.acquire(timeout=SOON_S)
        for lease in leases[1:]:
            self.channel.submit(lease)
        return leases


def test_a_reserved_lease_is_a_permit() -> None:
    """It finds room later. It can be given back, and drain does not wait for it."""
    work = _Work(limit=2)
    first, second, third = (Lease(number) for number in range(3))
    assert work.channel.reserve(first)
    work.channel.submit(second)
    work.channel.drain()
    assert work.channel.reserve(third)
    assert not work.channel.reserve(Lease(3), "skip")
    called: list[int] = []
    work.channel.afterwards(lambda: called.append(1))
    work.channel.submit(first)
    work.channel.drain()
    assert work.released == Counter([0, 1])
    work.channel.close()
    for _ in range(2):
        work.channel.give_back(third)
    assert work.released == Counter([0, 1, 2])
    assert called == [1]  # with the last lease, as no worker is left


def test_supersede() -> None:
    """The oldest queued lease ends for a new one; without one, `reserve` waits for room."""
    work = _Gated()
    _, oldest, newer = work.submitted(range(3))
    last = Lease(3)
    assert work.channel.reserve(last, "drop")
    assert (oldest.state, newer.state) == (LeaseState.FAILED, LeaseState.QUEUED)
    assert work.released == Counter([1])
    work.go_on.release(2)
    work.channel.wait(newer)
    assert work.channel.reserve(Lease(4))
    assert work.channel.reserve(Lease(5))
    waiting = threading.Thread(target=lambda: work.channel.reserve(Lease(6), "drop"))
    waiting.start()
    work.channel.give_back(last)
    waiting.join(SOON_S)
    assert not waiting.is_alive()
    assert [lease.item for lease in work.channel._outstanding] == [4, 5, 6]
    work.channel.close()


def test_room_comes_after_the_choice_of_the_next() -> None:
    """A caller that waits for room cannot drop what was queued before."""
    work = _Gated(limit=2, pick=_newest)
    states: list[LeaseState] = []
    work.channel._release = lambda _: states.append(leases[1].state)
    leases = work.submitted(range(2))
    work.go_on.release()
    work.channel.wait(leases[0])
    assert states == [LeaseState.RUNNING]
    work.go_on.release()
    work.channel.close()


@pytest.mark.parametrize(("on_full", "expected"), [("wait", [0, 2]), ("drop", [0, 3])])
def test_a_worker_begins_with_the_lease_that_it_was_started_for(
    on_full: OnFull, expected: list[int]
) -> None:
    """No newer lease takes its turn, and none drops it, however late its thread comes."""
    come, handled = threading.Event(), []

    def work() -> None:
        assert come.wait(SOON_S)
        channel.serve(handled.append)

    channel = Channel[int](work, name="test", limit=3, pick=_newest)
    for number in range(3):
        channel.submit(Lease(number))
    if on_full == "drop":
        last = Lease(3)
        assert channel.reserve(last, on_full)
        assert [one.item for one in channel._outstanding] == [0, 2, 3]
        channel.submit(last)
    come.set()
    channel.close()
    assert handled == expected


def test_a_drained_channel_that_does_not_linger_has_no_thread() -> None:
    """So a call of `afterwards` is made at once, in the thread that drained."""
    work = _Work(lingers=False)
    for number in range(20):
        work.channel.submit(Lease(number))
        work.channel.drain()
        assert work.channel.idle
        called: list[threading.Thread] = []
        work.channel.afterwards(lambda called=called: called.append(threading.current_thread()))
        assert called == [threading.current_thread()]


# An exception at every bytecode.


class _Watched(_Work):
    """A worker holds its first item until the submitter waits."""

    def __init__(self, **options: Any) -> None:
        self._waits = threading.Event()
        super().__init__(lambda _: self._waits.wait(1), **options)
        pause = self.channel._pause

        def paused() -> None:
            if threading.current_thread() not in self.channel._threads:
                self._waits.set()
            pause()

        self.channel._pause = paused


def _submitters_life(work: _Work, leases: list[Lease[int]], *, drains: bool) -> None:
    called: list[int] = []
    channel = work.channel
    try:
        for lease in leases[:3]:
            channel.submit(lease)
        if drains:
            channel.wait(leases[2])
            channel.submit(leases[3])
            channel.drain()
        else:
            channel.reserve(leases[3], "drop")
            channel.submit(leases[3])
            channel.reserve(leases[4], "skip")
    finally:
        channel.close(drop=True)
        channel.afterwards(lambda: called.append(1))


def _check_over(work: _Work, leases: list[Lease[int]]) -> None:
    """A closed channel has no lease outstanding but reserved ones. Each is HELD or has ended."""
    channel = work.channel
    with Footprint.unchanged():
        channel.close()
    for lease in leases:
        assert lease.state in (LeaseState.HELD, LeaseState.DONE, LeaseState.FAILED, LeaseState.LOST)
    assert all(lease.state is LeaseState.HELD for lease in channel._outstanding)
    assert not [thread for thread in channel._threads if thread.working]
    assert channel._lock.acquire(timeout=1)
    channel._lock.release()
    assert max(work.released.values(), default=0) <= 1
    for lease in leases:
        if lease.state in (LeaseState.HELD, LeaseState.LOST):
            assert not work.released[lease.item]
        if lease.state is LeaseState.DONE:
            assert lease.item in work.handled
    for lease in leases:
        channel.give_back(lease)
    assert not channel._outstanding
    assert max(work.released.values(), default=0) <= 1


def _interrupted(where: str, place: Place | None, **options: Any) -> Tracer:
    """Use and close a channel, with Boom at `place` in the `submitter` or in a `worker`."""
    tracer = Tracer([module.__file__], place)
    # CPython 3.12 crashes when two threads trace the opcodes of one function.
    crashes = where == "worker" and sys.version_info[:2] == (3, 12)
    work = _Watched(workers=1 if crashes else 2, **options)
    leases = [Lease(number) for number in range(5)]
    raised = tracer.run(
        lambda: _submitters_life(work, leases, drains=options["lingers"]),
        in_threads=where == "worker",
    )
    within(SOON_S, lambda: _check_over(work, leases))
    if tracer.hit and where == "submitter":
        assert isinstance(raised, Boom)
    return tracer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("lingers", [True, False])
@pytest.mark.parametrize("where", ["submitter", "worker"])
def test_an_exception_at_every_bytecode(
    where: str, lingers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any place: the channel can be closed, and no lease or thread is left behind."""
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.005)
    at_every_place(
        lambda place: _interrupted(where, place, lingers=lingers, pick=None if lingers else _newest)
    )


# Any order of calls.


_FATES = ("do", "do", "fail", "lose")


class _Any(RuleBasedStateMachine):
    """The machine decides how each lease ends; a watchdog limits each call of the channel."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[int, threading.Event] = {}
        self.fates: dict[int, str] = {}
        self.leases: list[Lease[int]] = []
        self.first: int | None = None
        self.work = _Work(self._handle, workers=1, limit=3, **self.options)
        self.channel = self.work.channel

    def _handle(self, number: int) -> None:
        assert self.gates[number].wait(SOON_S)
        if self.fates[number] == "fail":
            raise OSError(number, "failed")
        if self.fates[number] == "lose":
            self.channel.end_all(LeaseState.LOST)

    def _pending(self) -> list[Lease[int]]:
        return [one for one in self.leases if one.state in (LeaseState.QUEUED, LeaseState.RUNNING)]

    def _expect(self, call: Callable[[], object]) -> None:
        """The first failure is raised if there is one, and nothing else."""
        if self.channel.failure is None:
            within(SOON_S, call)
            return
        with pytest.raises(type(self.channel.failure)) as caught:
            within(SOON_S, call)
        assert caught.value is self.channel.failure

    def _wait_for_worker(self) -> None:
        """Wait until the worker is idle or blocked, so that every run has the same states."""

        def wait() -> None:
            while True:
                with self.channel._lock:
                    running = [one for one in self.leases if one.state is LeaseState.RUNNING]
                    listed = [
                        one for one in self.channel._outstanding if one.state is not LeaseState.HELD
                    ]
                    if all(not self.gates[one.item].is_set() for one in running) and (
                        listed == self._pending() and (running or not listed)  # taken or ended
                    ):
                        return
                    self.channel._changed.wait(0.01)

        within(SOON_S, wait)

    def _new(self, fate: str) -> Lease[int]:
        number = len(self.leases)
        self.gates[number], self.fates[number] = threading.Event(), fate
        self.leases.append(Lease(number))
        return self.leases[number]

    def _reserved(self) -> list[Lease[int]]:
        return [one for one in self.channel._outstanding if one.state is LeaseState.HELD]

    @precondition(lambda self: len(self.channel._outstanding) < 3 or self.channel.failure)
    @rule(fate=st.sampled_from(_FATES))
    def submit(self, fate: str) -> None:
        lease = self._new(fate)
        self._expect(lambda: self.channel.submit(lease))
        self._wait_for_worker()

    @rule(fate=st.sampled_from(_FATES))
    def reserve_or_skip(self, fate: str) -> None:
        lease, full = self._new(fate), len(self.channel._outstanding) >= 3
        self._expect(lambda: self.channel.reserve(lease, "skip"))
        failed = self.channel.failure is not None
        assert (lease in self.channel._outstanding) == (not full and not failed)

    @precondition(lambda self: self.channel._queued())
    @rule(fate=st.sampled_from(_FATES))
    def drop(self, fate: str) -> None:
        oldest, full = self.channel._queued()[0], len(self.channel._outstanding) >= 3
        lease = self._new(fate)
        self._expect(lambda: self.channel.reserve(lease, "drop"))
        failed = self.channel.failure is not None
        assert (oldest.state is LeaseState.FAILED) == (full or failed)
        assert (lease in self._reserved()) == (not failed)

    @precondition(lambda self: self._reserved())
    @rule(data=st.data())
    def submit_reserved(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self._reserved()))
        self._expect(lambda: self.channel.submit(lease))
        self._wait_for_worker()

    @precondition(lambda self: self._reserved())
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self._reserved()))
        self.channel.give_back(lease)
        assert lease not in self.channel._outstanding
        assert self.work.released[lease.item] == 1

    @precondition(lambda self: self._pending())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.gates[data.draw(st.sampled_from(self._pending())).item].set()
        self._wait_for_worker()

    @precondition(lambda self: not self._pending() or self.channel.failure)
    @rule()
    def drain(self) -> None:
        self._expect(self.channel.drain)

    @invariant()
    def bounded(self) -> None:
        assert len(self.channel._outstanding) <= 3
        assert max(self.work.released.values(), default=0) <= 1
        for lease in self.leases:
            if lease.state in (LeaseState.HELD, LeaseState.LOST):
                assert not self.work.released[lease.item]

    @invariant()
    def the_first_failure_stays(self) -> None:
        if self.first is None and self.channel.failure is not None:
            self.first = id(self.channel.failure)
        assert self.first in (None, id(self.channel.failure))

    def teardown(self) -> None:
        for gate in self.gates.values():
            gate.set()
        within(SOON_S, self.channel.close)
        assert not self._pending()
        assert list(self.channel._outstanding) == self._reserved()
        assert not [thread for thread in self.channel._threads if thread.is_alive()]


class _AnyNewest(_Any):
    options: ClassVar[dict[str, Any]] = {"pick": _newest, "lingers": False}


TestAnyOrder, TestAnyOrderNewest = _Any.TestCase, _AnyNewest.TestCase
for _case in (TestAnyOrder, TestAnyOrderNewest):
    _case.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)


# Who else may enter.


def test_a_forked_child_waits_for_nothing() -> None:
    """In the child `close` does nothing and `submit` raises; the parent's leases continue."""
    go_on = threading.Event()
    work, called = _Work(lambda _: go_on.wait(SOON_S)), []

    def use() -> None:
        work.channel._lock = threading.Lock()
        work.channel._lock.acquire()
        work.channel.close()
        work.channel.afterwards(lambda: called.append(1))
        assert called == [1]
        for call in (lambda: work.channel.submit(Lease(2)), work.channel.drain):
            with pytest.raises(RuntimeError, match="parent"):
                call()

    work.channel.submit(Lease(1))
    with work.channel._lock:  # as if another thread held it: no thread releases it in the child
        in_child(use)
    go_on.set()
    work.channel.drain()
    work.channel.close()
    assert work.handled == [1]


def test_a_signal_handler_uses_the_channel_that_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handler submits and drains inside a locked region of its thread; both continue."""
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.01)
    go_on = threading.Event()
    work = _Work(lambda _: go_on.wait(SOON_S), workers=1, limit=3)
    entered = []

    def handle(number: int, frame: FrameType | None) -> None:
        entered.append(work.channel._lock._is_owned())
        go_on.set()
        work.channel.submit(Lease("handler"))
        work.channel.drain()

    def interrupted() -> bool:
        if not entered:
            signal.raise_signal(signal.SIGUSR1)
        return drained()

    drained = work.channel._drained
    before = signal.signal(signal.SIGUSR1, handle)
    signal.alarm(SOON_S)
    try:
        work.channel.submit(Lease("main"))
        monkeypatch.setattr(work.channel, "_drained", interrupted)
        work.channel.drain()
        work.channel.close()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGUSR1, before)
    assert entered == [True]
    assert work.handled == ["main", "handler"]


@pytest.mark.parametrize("raised", [SystemExit, TimeoutError])
def test_any_interrupt_of_close_is_raised_after_it(raised: type[BaseException]) -> None:
    """SystemExit of a SIGTERM handler, TimeoutError of an alarm: close ends first."""
    go_on, waits = threading.Event(), threading.Event()
    work = _Watched()
    work._waits.set()
    work._handle = lambda _: go_on.wait(SOON_S)
    work.channel.submit(lease := Lease(1))

    def handle(number: int, frame: FrameType | None) -> None:
        go_on.set()
        raise raised

    pause = work.channel._pause

    def paused() -> None:
        if threading.current_thread() is threading.main_thread() and not waits.is_set():
            waits.set()
            signal.raise_signal(signal.SIGUSR1)
        pause()

    work.channel._pause = paused
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with Footprint.unchanged(), pytest.raises(raised):
            work.channel.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert lease.state is LeaseState.DONE


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize("name", ["__init__", "start"])
def test_a_thread_that_cannot_start(
    error: type[BaseException], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller keeps the lease, and no permit is lost."""
    work = _Work(limit=1)

    def broken(*arguments: object, **options: object) -> None:
        raise error("no thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, name, broken)
        lease = Lease(1)
        for reserved in (False, True):
            if reserved:
                work.channel.reserve(lease)
            with pytest.raises(error):
                within(SOON_S, lambda: work.channel.submit(lease))
            assert lease.state is LeaseState.HELD
            assert list(work.channel._outstanding) == [lease] * reserved

    def use() -> None:
        if work.channel.failure is None:
            work.channel.submit(lease)
            work.channel.drain()
        work.channel.close()

    within(SOON_S, use)
    assert work.handled == [1] or isinstance(work.channel.failure, RuntimeError)


def test_a_worker_that_dies_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter detects it: the lease is LOST, and its memory is not released."""
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.01)
    work = _Work()
    monkeypatch.setattr(work.channel, "_run", work.channel.next)
    work.channel.submit(lease := Lease(1))

    def drain() -> None:
        with pytest.raises(RuntimeError, match="ended before its work"):
            work.channel.drain()
        work.channel.close()

    within(SOON_S, drain)
    assert lease.state is LeaseState.LOST
    assert not work.released
