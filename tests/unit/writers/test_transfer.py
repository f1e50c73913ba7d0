"""Transfer and Meter: counts and their sums."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import pytest

from iobench.writers.transfer import Fallback, Meter, PathCount, Transfer

_ONE = Transfer(
    writer="odirect",
    operation="write",
    files=1,
    bytes=100,
    elapsed_s=2.0,
    durable=True,
    phases_s={"gather": 0.5, "write": 1.0},
    paths={"direct": PathCount(operations=2, bytes=128)},
    retries=1,
    fallbacks=(Fallback(wanted="fallocate", used="none", reason="refused"),),
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the test moves."""
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_total_adds_up() -> None:
    """Files, bytes, seconds, phases, paths and retries are summed; a fallback counts once."""
    other = replace(
        _ONE,
        bytes=50,
        elapsed_s=1.0,
        phases_s={"write": 0.25, "sync": 0.5},
        paths={
            "direct": PathCount(operations=1, bytes=64),
            "buffered": PathCount(operations=1, bytes=0),
        },
    )
    total = Transfer.total([_ONE, other])
    assert total == replace(
        _ONE,
        files=2,
        bytes=150,
        elapsed_s=3.0,
        phases_s={"gather": 0.5, "write": 1.25, "sync": 0.5},
        paths={
            "direct": PathCount(operations=3, bytes=192),
            "buffered": PathCount(operations=1, bytes=0),
        },
        retries=2,
    )


def test_total_is_durable_when_all_are() -> None:
    """One part that is not durable makes the sum not durable."""
    assert Transfer.total([_ONE, _ONE]).durable
    assert not Transfer.total([_ONE, replace(_ONE, durable=False), _ONE]).durable


def test_total_keeps_every_fallback_in_order() -> None:
    """Different fallbacks are all listed, in the order in which they happened."""
    second = Fallback(wanted="uncached", used="buffered", reason="old kernel")
    total = Transfer.total([_ONE, replace(_ONE, fallbacks=(second,)), _ONE])
    assert total.fallbacks == (*_ONE.fallbacks, second)


def test_total_of_nothing_is_refused() -> None:
    """There is no sum of no transfers."""
    with pytest.raises(ValueError, match="no transfers"):
        Transfer.total([])


def test_phases_sum_up(clock: list[float]) -> None:
    """The same phase twice is summed, also when its block raises."""
    meter = Meter()
    with meter.phase("write"):
        clock[0] += 1.5
    with contextlib.suppress(KeyError), meter.phase("write"):
        clock[0] += 0.25
        raise KeyError
    with meter.phase("sync"):
        clock[0] += 2.0
    assert meter.seconds == {"write": 1.75, "sync": 2.0}


def test_transfer_runs_since_the_meter_was_made(clock: list[float]) -> None:
    """elapsed_s is the time from the construction of the Meter to that of the Transfer."""
    meter = Meter(started_s=clock[0])
    clock[0] += 4.0
    moved = meter.transfer("w", "read", 7, durable=True)
    assert (moved.elapsed_s, moved.bytes, moved.files) == (4.0, 7, 1)


def test_absorb_averages_seconds_and_sums_the_rest() -> None:
    """Seconds of concurrent workers are averaged; bytes, operations and retries are summed."""
    first, second, meter = Meter(), Meter(), Meter()
    first.seconds.update(gather=1.0, write=2.0)
    second.seconds.update(write=4.0)
    first.count("direct", 10, 2)
    second.count("direct", 5)
    second.retries = 3
    meter.count("direct", 1)
    meter.absorb([first, second])
    assert meter.seconds == {"gather": 0.5, "write": 3.0}
    assert meter.paths == {"direct": PathCount(operations=4, bytes=16)}
    assert meter.retries == 3


def test_the_same_fallback_counts_once() -> None:
    """The same fallback in every block is listed once."""
    meter = Meter()
    for _ in range(3):
        meter.fell_back("a", "b", "c")
    other = Meter()
    other.fell_back("a", "b", "c")
    other.fell_back("a", "b", "another reason")
    meter.absorb([other])
    assert len(meter.transfer("w", "write", 0, durable=True).fallbacks) == 2


def test_a_transfer_does_not_change_afterwards() -> None:
    """Later counts of the meter do not change a Transfer."""
    meter = Meter()
    meter.count("direct", 1)
    moved = meter.transfer("w", "write", 1, durable=True)
    meter.count("direct", 1)
    assert moved.paths == {"direct": PathCount(operations=1, bytes=1)}
