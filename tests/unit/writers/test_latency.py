"""Latency: percentiles of a histogram against those of numpy, sums, and what reports make of it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.results.codec import from_plain, to_plain
from iobench.writers.transfer import Latency, LatencyCounter, LatencyFigures, Meter, Transfer

_HALF_A_BIN = 1 / 128

nanoseconds = st.lists(st.integers(0, 10**12), min_size=1, max_size=300)


def counted(values: list[int]) -> Latency:
    counter = LatencyCounter()
    for one in values:
        counter.took(one / 1e9)
    return Latency.total([counter])


@given(nanoseconds, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[int], percent: float) -> None:
    """Within half of a bin, which is 0.8% of the latency, and below 128 ns exactly."""
    found = counted(values).percentile_s(percent) * 1e9
    exact = np.percentile(values, percent, method="inverted_cdf")
    assert abs(found - exact) <= exact * _HALF_A_BIN + 1e-3
    assert counted(values).percentile_s(100) * 1e9 == pytest.approx(max(values), abs=1e-3)


def test_a_heavy_tail_at_every_percentile() -> None:
    """100,000 latencies of a device: every percentile that reports show."""
    random = np.random.default_rng(1)
    values = np.rint(random.lognormal(13, 1.5, 100_000)).astype(int)
    latency = counted(values.tolist())
    figures = LatencyFigures.of(latency)
    for found, percent in (
        (figures.p50_s, 50),
        (figures.p95_s, 95),
        (figures.p99_s, 99),
        (figures.p99_9_s, 99.9),
        (figures.max_s, 100),
    ):
        assert found is not None
        exact = np.percentile(values, percent, method="inverted_cdf")
        assert found * 1e9 == pytest.approx(exact, rel=_HALF_A_BIN)
    assert figures.operations == latency.count == 100_000
    assert len(latency.bins) < 1000


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
