"""Channel: after any interrupt no wait hangs, no permit is lost, the first failure is kept."""

from __future__ import annotations

import dis
import functools
import gc
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from iobench.testing import Footprint
from iobench.writers.blocks import channel as module
from iobench.writers.blocks.channel import Channel, Lease, LeaseState

_FILE = module.__file__
_SOON_S = 10  # a wait that takes longer hangs


class _Boom(KeyboardInterrupt):
    """The exception that is raised at one bytecode."""


@pytest.fixture(autouse=True)
def _nothing_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_lost", [])


def _within(seconds: float, call: Callable[[], None]) -> None:
    """Run `call()` in a new thread; fail with its stack if it does not return in time."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 -- raised below
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        frame = sys._current_frames()[thread.ident or 0]
        pytest.fail("hangs:\n" + "".join(traceback.format_stack(frame)))
    if raised:
        raise raised[0]


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

    _within(_SOON_S, use)


# An exception at every bytecode.

_Place = tuple[CodeType, int]


@functools.cache
def _leaving_a_with(code: CodeType) -> frozenset[int]:
    """Offsets of the calls of `__exit__` at the end of a `with`, arguments included.

    CPython runs no signal handler there before the call, and the call is the RLock's own, in C.
    """
    found: set[int] = set()
    steps = [step for step in dis.get_instructions(code) if step.opname != "PRECALL"]
    for at in range(len(steps) - 3):
        *nones, call = steps[at : at + 4]
        if call.opname.startswith("CALL") and all(
            step.opname == "LOAD_CONST" and step.argval is None for step in nones
        ):
            first = steps[at - 1] if steps[at - 1].opname == "SWAP" else nones[0]  # of a return
            found.update(range(first.offset, call.offset + 2))
    return frozenset(found)


class _Tracer:
    """Records the bytecodes of the channel that threads execute, or raises _Boom at one of them."""

    def __init__(self, target: _Place | None = None) -> None:
        self.passed: dict[_Place, None] = {}
        self._target = target
        self.hit = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != _FILE:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            place = frame.f_code, frame.f_lasti
            if place == self._target and not self.hit:
                self.hit = True
                raise _Boom
            if frame.f_lasti not in _leaving_a_with(frame.f_code):
                self.passed[place] = None
        return self._opcode


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

        self.channel._pause = paused  # type: ignore[method-assign]


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
    finally:
        channel.close(drop=True)
        channel.afterwards(lambda: called.append(1))


def _check_over(work: _Work, leases: list[Lease[int]]) -> None:
    """A closed channel has no outstanding lease, and each lease is HELD or has ended."""
    channel = work.channel
    with Footprint.unchanged():
        channel.close()
    for lease in leases:
        assert lease.state in (LeaseState.HELD, LeaseState.DONE, LeaseState.FAILED, LeaseState.LOST)
    assert not channel._outstanding
    assert not [thread for thread in channel._threads if thread.working]
    assert channel._lock.acquire(timeout=1)
    channel._lock.release()
    assert max(work.released.values(), default=0) <= 1
    for lease in leases:
        if lease.state in (LeaseState.HELD, LeaseState.LOST):
            assert not work.released[lease.item]
        if lease.state is LeaseState.DONE:
            assert lease.item in work.handled


def _interrupted(where: str, place: _Place | None, **options: Any) -> _Tracer:
    """Use and close a channel, with _Boom at `place` in the `submitter` or in a `worker`."""
    tracer = _Tracer(place)
    work = _Watched(**options)
    leases = [Lease(number) for number in range(4)]
    raised: list[BaseException] = []

    def live() -> None:
        if where == "submitter":
            sys.settrace(tracer)
        else:
            threading.settrace(tracer)
        try:
            _submitters_life(work, leases, drains=options["lingers"])
        except BaseException as error:  # noqa: BLE001 -- looked at below
            raised.append(error)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    _within(_SOON_S, live)
    _within(_SOON_S, lambda: _check_over(work, leases))
    if tracer.hit and where == "submitter":
        assert raised
        assert isinstance(raised[0], _Boom)
    return tracer


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("lingers", [True, False])
@pytest.mark.parametrize("where", ["submitter", "worker"])
def test_an_exception_at_every_bytecode(
    where: str, lingers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any place: the channel can be closed, and no lease or thread is left behind."""
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.005)
    places: dict[_Place, None] = {}
    for _ in range(3):
        places |= _interrupted(where, None, lingers=lingers).passed
    assert len(places) > 100
    hits = 0
    for place in places:
        try:
            hits += _interrupted(where, place, lingers=lingers).hit
        except BaseException as error:
            code, offset = place
            lines = [line for start, stop, line in code.co_lines() if start <= offset < stop]
            error.add_note(f"interrupted in {code.co_name}, line {lines}, offset {offset}")
            raise
    assert hits > 0.8 * len(places)


# Any order of calls.


class _Any(RuleBasedStateMachine):
    """The machine decides how each lease ends; a watchdog limits each call of the channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[int, threading.Event] = {}
        self.fates: dict[int, str] = {}
        self.leases: list[Lease[int]] = []
        self.first: int | None = None
        self.work = _Work(self._handle, workers=1, limit=3)
        self.channel = self.work.channel

    def _handle(self, number: int) -> None:
        assert self.gates[number].wait(_SOON_S)
        if self.fates[number] == "fail":
            raise OSError(number, "failed")
        if self.fates[number] == "lose":
            self.channel.end_all(LeaseState.LOST)

    def _pending(self) -> list[Lease[int]]:
        return [one for one in self.leases if one.state in (LeaseState.QUEUED, LeaseState.RUNNING)]

    def _expect(self, call: Callable[[], object]) -> None:
        """The first failure is raised if there is one, and nothing else."""
        if self.channel.failure is None:
            _within(_SOON_S, call)
            return
        with pytest.raises(type(self.channel.failure)) as caught:
            _within(_SOON_S, call)
        assert caught.value is self.channel.failure

    def _wait_for_worker(self) -> None:
        """Wait until the worker is idle or blocked, so that every run has the same states."""

        def wait() -> None:
            while True:
                with self.channel._lock:
                    running = [one for one in self.leases if one.state is LeaseState.RUNNING]
                    listed = list(self.channel._outstanding)
                    if all(not self.gates[one.item].is_set() for one in running) and (
                        listed == self._pending() and (running or not listed)
                    ):
                        return
                    self.channel._changed.wait(0.01)

        _within(_SOON_S, wait)

    @precondition(lambda self: len(self.channel._outstanding) < 3 or self.channel.failure)
    @rule(fate=st.sampled_from(["do", "do", "fail", "lose"]))
    def submit(self, fate: str) -> None:
        number = len(self.leases)
        self.gates[number], self.fates[number] = threading.Event(), fate
        self.leases.append(Lease(number))
        self._expect(lambda: self.channel.submit(self.leases[number]))
        self._wait_for_worker()

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
        _within(_SOON_S, self.channel.close)
        assert not self._pending()
        assert not self.channel._outstanding
        assert not [thread for thread in self.channel._threads if thread.is_alive()]


TestAnyOrder = _Any.TestCase
TestAnyOrder.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)


# Who else may enter.


def test_a_forked_child_waits_for_nothing() -> None:
    """In the child `close` does nothing and `submit` raises; the parent's leases continue."""
    go_on = threading.Event()
    work, called = _Work(lambda _: go_on.wait(_SOON_S)), []
    work.channel.submit(Lease(1))
    with work.channel._lock:  # as if another thread held it: no thread releases it in the child
        child = os.fork()
        if child == 0:
            work.channel._lock = threading.Lock()  # type: ignore[assignment]
            work.channel._lock.acquire()
            try:
                signal.alarm(_SOON_S)
                work.channel.close()
                work.channel.afterwards(lambda: called.append(1))
                assert called == [1]
                for call in (lambda: work.channel.submit(Lease(2)), work.channel.drain):
                    with pytest.raises(RuntimeError, match="parent"):
                        call()
                os._exit(0)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go_on.set()
    work.channel.drain()
    work.channel.close()
    assert work.handled == [1]


class _Owner:
    """Closes its channel when it is collected, like a stream."""

    def __init__(self) -> None:
        self.cycle, self.closed_in, self.over = self, [], threading.Event()
        self.work: _Work | None = None

    def __del__(self) -> None:
        assert self.work is not None
        self.work.channel.close(drop=True)
        self.closed_in.append(threading.current_thread())
        self.work.channel.afterwards(self.over.set)


def test_collected_in_its_own_worker() -> None:
    """The worker does not wait for itself; the last worker makes the `afterwards` calls."""

    def use() -> None:
        collect, in_time = threading.Event(), []
        owner = _Owner()
        over, closed_in = owner.over, owner.closed_in

        def handle(_: object) -> None:
            assert collect.wait(_SOON_S)
            gc.collect()
            in_time.append(not over.is_set())  # this thread still uses the memory

        owner.work = work = _Work(handle, workers=1)
        leases = [Lease(1), Lease(2)]
        for lease in leases:
            work.channel.submit(lease)
        del owner
        collect.set()
        assert over.wait(_SOON_S)
        assert [thread.name for thread in closed_in] == ["test"]
        assert in_time == [True]
        assert [lease.state for lease in leases] == [LeaseState.DONE, LeaseState.FAILED]

    gc.disable()
    try:
        _within(_SOON_S, use)
    finally:
        gc.enable()


def test_a_signal_handler_uses_the_channel_that_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handler submits and drains inside a locked region of its thread; both continue."""
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.01)
    go_on = threading.Event()
    work = _Work(lambda _: go_on.wait(_SOON_S), workers=1, limit=3)
    entered = []

    def handle(number: int, frame: FrameType | None) -> None:
        entered.append(work.channel._lock._is_owned())  # type: ignore[attr-defined]
        go_on.set()
        work.channel.submit(Lease("handler"))
        work.channel.drain()

    def interrupted() -> bool:
        if not entered:
            signal.raise_signal(signal.SIGUSR1)
        return drained()

    drained = work.channel._drained
    before = signal.signal(signal.SIGUSR1, handle)
    signal.alarm(_SOON_S)
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
    work._handle = lambda _: go_on.wait(_SOON_S)
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

    work.channel._pause = paused  # type: ignore[method-assign]
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
        for _ in range(2):
            with pytest.raises(error):
                _within(_SOON_S, lambda: work.channel.submit(lease))
            assert lease.state is LeaseState.HELD

    def use() -> None:
        if work.channel.failure is None:
            work.channel.submit(lease)
            work.channel.drain()
        work.channel.close()

    _within(_SOON_S, use)
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

    _within(_SOON_S, drain)
    assert lease.state is LeaseState.LOST
    assert not work.released
