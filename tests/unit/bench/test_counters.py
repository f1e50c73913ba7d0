"""Counters around a timed operation, with a fake clock and a fake device."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from iobench.bench.counters import monitor as counters
from iobench.bench.counters.monitor import Counters
from iobench.bench.counters.sampler import Reading
from iobench.environment import DeviceCounters


def device(read: int, write: int) -> DeviceCounters:
    return DeviceCounters(read_bytes=read, write_bytes=write)


def io(read: int, write: int) -> dict[str, int]:
    return {"read_bytes": read, "write_bytes": write}


def monitor(*readings: DeviceCounters | None) -> Any:
    """A monitor that returns these readings, one after the other."""
    return SimpleNamespace(read=iter(readings).__next__)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Wall clock, CPU clocks and counters of the process, set by the test."""
    state = SimpleNamespace(wall=10.0, cpu=1.0, system=(100.0, 4.0), process=io(5, 7), stall=0.5)
    time = SimpleNamespace(
        perf_counter=lambda: state.wall,
        process_time=lambda: state.cpu,
    )
    monkeypatch.setattr(counters, "time", time)
    monkeypatch.setattr(counters, "_cpu_times_s", lambda: state.system)
    monkeypatch.setattr(counters, "memory_stall_s", lambda: state.stall)
    monkeypatch.setattr(counters, "_process_io", lambda: state.process)
    return state


def test_everything_is_a_difference(clock: SimpleNamespace) -> None:
    """Seconds, CPU seconds and bytes between start and stop."""
    counting = Counters(monitor(device(1000, 2000), device(1100, 2500)))
    clock.wall, clock.cpu, clock.system, clock.process = 12.5, 1.75, (103.0, 4.5), io(15, 27)
    clock.stall = 0.75
    assert counting.elapsed_s() == 2.5
    counted = counting.stop()
    assert (counted.elapsed_s, counted.cpu_s, counted.system_cpu_s) == (2.5, 0.75, 3.0)
    moved = counted.device
    assert (moved.read_bytes, moved.write_bytes) == (100, 500)
    assert (moved.process_read_bytes, moved.process_write_bytes) == (10, 20)
    assert counted.readings == ()
    assert counted.began_s == 10.0
    others = counted.interference
    assert (others.steal_s, others.memory_stall_s) == (0.5, 0.25)
    assert (others.foreign_read_bytes, others.foreign_write_bytes) == (90, 480)


def test_bytes_charged_before_they_reach_the_device_are_not_negative_others(
    clock: SimpleNamespace,
) -> None:
    """The kernel charges a process for a page when it dirties the page."""
    counting = Counters(monitor(device(0, 0), device(0, 0)))
    clock.process = io(5, 7 + 4096)
    assert counting.stop().interference.foreign_write_bytes == 0


def test_a_kernel_without_pressure_counters(clock: SimpleNamespace) -> None:
    """A counter that the kernel lacks is None, never zero."""
    clock.stall = None
    assert Counters(monitor(None, None)).stop().interference.memory_stall_s is None


def test_the_clock_is_read_first(clock: SimpleNamespace) -> None:
    """The time for reading the other counters is not in the elapsed time."""

    def slow() -> DeviceCounters:
        clock.wall += 50
        return device(0, 0)

    counting = Counters(SimpleNamespace(read=slow))
    clock.wall += 1
    assert counting.stop().elapsed_s == 1


def test_the_clock_goes_on_during_the_check(clock: SimpleNamespace) -> None:
    """A writer's threads may work in its time. Readings of the sampler are on the same clock."""
    begun = clock.wall

    def read() -> DeviceCounters:
        if clock.wall == begun + 2:
            clock.wall, clock.cpu = clock.wall + 5, clock.cpu + 4
        return DeviceCounters(read_bytes=0, write_bytes=0, flushes=int(clock.wall))

    class Sampler:
        def readings(self, since_s: float, until_s: float) -> list[Reading]:
            assert (since_s, until_s) == (begun, begun + 10)
            moments = (1.0, 4.0, 9.0)
            return [Reading(at_s=begun + at, read_bytes=0, write_bytes=0) for at in moments]

    counting = Counters(SimpleNamespace(read=read), Sampler())  # type: ignore[arg-type]  # doubles
    clock.wall, clock.cpu = begun + 2, clock.cpu + 2
    assert counting.flushes() == 7
    assert counting.elapsed_s() == 7
    clock.wall += 3
    counted = counting.stop()
    assert (counted.elapsed_s, counted.cpu_s) == (10, 6)
    assert [one.at_s for one in counted.readings] == [1, 4, 9, 10]


@pytest.mark.parametrize(
    "readings", [(None, None), (device(0, 0), None), (None, device(9, 9))], ids=repr
)
def test_a_device_that_cannot_be_read(
    clock: SimpleNamespace, readings: tuple[DeviceCounters | None, ...]
) -> None:
    """A missing reading gives no count, never zero."""
    moved = Counters(monitor(*readings)).stop().device
    assert moved.read_bytes is None
    assert moved.write_bytes is None
    assert Counters(monitor(*readings)).stop().interference.foreign_write_bytes is None


def test_a_kernel_without_process_counters(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without /proc/self/io the bytes of the process are unknown."""
    clock.process = {}
    moved = Counters(monitor(device(0, 0), device(0, 4096))).stop().device
    assert (moved.process_read_bytes, moved.process_write_bytes) == (None, None)
    assert moved.write_bytes == 4096


def test_the_kernels_files_are_understood(tmp_path: Path) -> None:
    """/proc/self/io counts what this process writes; /proc/stat's busy time only grows."""
    before, (busy, steal) = counters._process_io(), counters._cpu_times_s()
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8192))
    after = counters._process_io()
    assert counters._cpu_times_s()[0] >= busy > 0 <= steal
    if not before or not after:
        pytest.skip("this kernel does not count a process's I/O")
    assert after["write_bytes"] >= before["write_bytes"]


@pytest.mark.parametrize("content", ["", "read_bytes: x\nwrite_bytes: 1\n", "read_bytes: 1\n"])
def test_a_file_that_says_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """A /proc/self/io without the two figures counts as missing."""
    path = tmp_path / "io"
    path.write_text(content)
    monkeypatch.setattr(counters, "open", lambda _name: path.open(), raising=False)
    assert counters._process_io() == {}


def test_stolen_time_is_not_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hypervisor gave to others used no CPU of this machine; nor do idle and waiting."""
    path = tmp_path / "stat"
    path.write_text("cpu  100 10 20 5000 300 1 2 700 50 0\n")
    monkeypatch.setattr(counters, "open", lambda _name: path.open(), raising=False)
    monkeypatch.setattr(counters, "_TICK_S", 1.0)
    assert counters._cpu_times_s() == (133, 700)
