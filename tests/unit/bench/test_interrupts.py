"""Deferred interrupts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from iobench.bench.processes.interrupts import deferred_interrupts


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts() -> Iterator[None]:
    """Python's own handler, also if these tests are a background job that ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end() -> None:
    """Ctrl-C inside the block takes effect after it, once."""
    done = []

    def work() -> None:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_another_thread_takes_waits_too() -> None:
    """Also if the kernel delivers the signal to another thread."""
    done = []

    def work() -> None:
        with deferred_interrupts():
            thread = threading.Thread(target=signal.raise_signal, args=(signal.SIGINT,))
            thread.start()
            thread.join()
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]


def test_what_was_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that nohup or a background job ignores stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with deferred_interrupts():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_nothing_is_touched() -> None:
    """Only the main thread may set handlers, and only it is interrupted."""
    seen = []

    def work() -> None:
        with deferred_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_an_error_inside_comes_out() -> None:
    """An exception of the block propagates, and the handlers are restored."""
    with pytest.raises(ValueError, match="inside"), deferred_interrupts():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
