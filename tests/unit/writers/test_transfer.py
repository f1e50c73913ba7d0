"""Transfer and Meter: counts, their sums, phases that add up to the time, and latencies."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.results.codec import from_plain, to_plain
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.transfer import (
    Fallback,
    Latency,
    LatencyFigures,
    Meter,
    PathCount,
    Transfer,
)

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


def test_what_a_total_has() -> None:
    """It is durable if all parts are, and has all fallbacks in the order in which they happened."""
    second = Fallback(wanted="uncached", used="buffered", reason="old kernel")
    assert Transfer.total([_ONE, _ONE]).durable
    total = Transfer.total([_ONE, replace(_ONE, fallbacks=(second,), durable=False), _ONE])
    assert not total.durable
    assert total.fallbacks == (*_ONE.fallbacks, second)
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


def test_workers_have_all_of_their_time_in_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the work moves, exactly: what a worker does outside of its own phases,
    and its wait for the others, is `threads`."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def work(blocks: Blocks, own: Meter) -> None:
        for _ in blocks:
            with own.phase("write"):
                now[0] += 0.5
            now[0] += 0.25

    meter = Meter()
    run_workers(1, Blocks([(0, 4)], 1), work, meter)
    assert meter.seconds == {"write": 2.0, "threads": 1.0}
    assert sum(meter.seconds.values()) == now[0] - 100


def test_the_wait_for_the_last_worker_is_in_a_phase() -> None:
    """Of two workers one writes for 3 s and the other for 1 s, which then waits for 2 s."""
    meter = Meter()
    meter.absorb([Meter(seconds={"write": 3.0}), Meter(seconds={"write": 1.0})], 3.0)
    assert meter.seconds == {"write": 2.0, "threads": 1.0}


_HALF_A_BIN = 1 / 128

nanoseconds = st.lists(st.integers(0, 10**12), min_size=1, max_size=300)


def counted(values: list[int]) -> Latency:
    latency = Latency()
    for one in values:
        latency.took(one / 1e9)
    return latency


@given(nanoseconds, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[int], percent: float) -> None:
    """Within half of a bin, which is 0.8% of the latency, and below 128 ns exactly."""
    found = counted(values).percentile_s(percent) * 1e9
    exact = np.percentile(values, percent, method="inverted_cdf")
    assert abs(found - exact) <= exact * _HALF_A_BIN + 1e-3
    assert counted(values).percentile_s(100) * 1e9 == pytest.approx(max(values), abs=1e-3)


@given(st.lists(nanoseconds, min_size=1, max_size=5))
def test_a_sum_is_the_histogram_of_all(parts: list[list[int]]) -> None:
    """Pooling loses nothing: workers, processes and samples are added bin by bin."""
    assert Latency.total(map(counted, parts)) == counted([one for part in parts for one in part])


def test_too_few_operations_have_no_high_percentile() -> None:
    """A percentile above all operations but the longest is not known."""
    few = LatencyFigures.of(counted([1000] * 99))
    assert (few.p95_s, few.p99_s, few.p99_9_s) == (few.p50_s, None, None)
    assert LatencyFigures.of(counted([1000] * 1000)).p99_9_s is not None


def test_a_histogram_survives_a_record() -> None:
    """The keys of a JSON object are texts, and become the ends of bins again."""
    latency = counted([5, 130, 10**9])
    assert from_plain(Latency, to_plain(latency)) == latency


@pytest.mark.parametrize("bins", [{-1: 1}, {5: 0}, {5: -1}])
def test_impossible_counts_are_refused(bins: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        Latency(max_ns=10, bins=bins)


def test_a_meter_counts_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their time is in the phase of the same name; a failed operation has no latency. Workers and
    transfers in sequence are added up."""
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter, worker = Meter(), Meter()
    for seconds in (0.25, 0.5):
        with worker.operation("write"):
            now[0] += seconds
    with pytest.raises(OSError), worker.operation("write"):  # noqa: PT011, PT012 -- both are one
        now[0] += 1
        raise OSError
    worker.took("read", 2.0)
    meter.absorb([worker])
    transfer = meter.transfer("odirect", "write", 1, durable=True)
    assert transfer.phases_s == {"write": 1.75}
    assert transfer.latencies == {
        "write": counted([250_000_000, 500_000_000]),
        "read": counted([2_000_000_000]),
    }
    twice = Transfer.total([transfer, transfer])
    assert {name: one.count for name, one in twice.latencies.items()} == {"write": 4, "read": 2}
