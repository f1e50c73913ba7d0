"""Bytes over time: all bytes between the start of the clock and its end, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.bench.counters import sampler as sampler_module
from iobench.bench.counters.monitor import Counters, by_growth, by_ticks, make_series
from iobench.bench.counters.sampler import Sampler
from iobench.environment import DeviceCounters
from iobench.writers.transfer import Meter

from .conftest import IdleMonitor

STAT = "1 0 {read} 0 1 0 {write} 0 0 0 0"


def test_growth_is_even_between_readings() -> None:
    # 100 bytes until 0.15 s, then 60 more until 0.25 s: by 0.1 s 66.7, by 0.2 s 130, at last 160.
    assert by_growth([(0.15, 100), (0.25, 160)]) == (67, 63, 30)


def test_an_operation_shorter_than_an_interval_has_one() -> None:
    assert by_growth([(0.02, 7)]) == (7,)
    assert by_ticks({1000: 7}, 10.001, 0.02) == (7,)


@given(
    st.lists(st.tuples(st.floats(0.001, 3), st.integers(0, 2**40)), min_size=1, max_size=20),
)
def test_every_byte_that_a_counter_saw_is_in_some_interval(
    steps: list[tuple[float, int]],
) -> None:
    points, at, total = [], 0.0, 0
    for seconds, moved in steps:
        at, total = at + seconds, total + moved
        points.append((at, total))
    series = by_growth(points)
    assert sum(series) == total
    assert min(series) >= 0
    assert (len(series) - 1) * 0.1 < at + 1e-9 <= len(series) * 0.1 + 2e-9


def test_ticks_by_hand() -> None:
    # The clock began at 10.005: tick 1000 began a little before, at 10.00.
    assert by_ticks({1000: 1, 1009: 2, 1011: 4, 1029: 8}, 10.005, 0.3) == (3, 4, 8)


@pytest.mark.parametrize("tick", [998, 1032])
def test_bytes_of_another_time_are_refused(tick: int) -> None:
    with pytest.raises(ValueError, match="5 bytes at"):
        by_ticks({tick: 5}, 10.005, 0.3)


def test_a_meter_knows_when_bytes_were_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter, worker = Meter(), Meter()
    meter.count("direct", 100)
    now[0] = 10.004
    worker.count("direct", 10)
    now[0] = 10.25
    worker.count("direct", 1)
    worker.count("throttled", 0)
    meter.absorb([worker])
    assert meter.transfer("w", "write", 111, durable=True).completed == {1000: 110, 1025: 1}


def test_the_sampler_reads_the_devices_counters(tmp_path: Path) -> None:
    """The first and last values are read with the clock; a child process reads the others."""
    stat = tmp_path / "stat"
    values = {"read": 10, "write": 100}
    device = IdleMonitor()
    stat.write_text(STAT.format(**values))

    def read() -> DeviceCounters:
        return DeviceCounters(read_bytes=512 * values["read"], write_bytes=512 * values["write"])

    device.read = read
    with Sampler([stat]) as sampler:
        _wait_for_readings(sampler)
        counting = Counters(device, sampler)
        began = time.perf_counter()
        values["write"] = 300
        stat.write_text(STAT.format(**values))
        _wait_for_readings(sampler, since_s=began)
        values["write"] = 400
        counted = counting.stop()
        series = make_series("save", counted, None)
        assert make_series("restore", counted, None).counted == (0,) * len(series.counted or ())
    assert {one.write_bytes for one in counted.readings[:-1]} <= {0, 512 * 200}
    assert 512 * 200 in {one.write_bytes for one in counted.readings[:-1]}
    assert counted.readings[-1].write_bytes == 512 * 300
    assert series.counter == "device"
    assert series.completed is None
    assert sum(series.counted or ()) == 512 * 300


def test_a_device_that_counts_nothing_gives_no_series() -> None:
    silent = SimpleNamespace(readings=lambda *_: [])
    series = make_series("save", Counters(IdleMonitor(), silent).stop(), {})
    assert (series.counter, series.counted) == (None, None)
    assert set(series.completed or ()) == {0}


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    """If the parent is killed, the sampler ends, because its pipe is closed."""
    read_end, write_end = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", str(sampler_module._PROGRAM), "10", "/proc/self/io"],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
    )
    os.close(read_end)
    os.close(write_end)
    assert child.wait(timeout=30) == 0


def _wait_for_readings(sampler: Sampler, since_s: float = 0.0) -> None:
    """Wait until the child has read twice since then, as the first reading may have begun
    before."""
    deadline = time.monotonic() + 30
    while len(sampler.readings(since_s, float("inf"))) < 2:
        assert time.monotonic() < deadline, "the sampler's child reads nothing"
        time.sleep(0.01)
