"""Counters: CPU time and I/O of process, machine and device, around a timed operation.

Also their sum over the machines of a job, and the series of one operation: bytes per 100 ms.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

import numpy as np

from iobench.bench.counters.sampler import Reading, Sampler
from iobench.environment import DeviceCounters, DeviceMonitor
from iobench.environment.memory import memory_stall_s
from iobench.results.records import DeviceCounts, Interference, Operation, Series
from iobench.writers.transfer import TICK_S

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT, _STEAL = 3, 4, 7  # columns of the cpu line of /proc/stat


@dataclass(frozen=True, kw_only=True)
class Usage:
    """CPU seconds of a process, and its counters of /proc/self/io, which may be missing.

    The kernel adds a child's counters to its parent's only when the parent has waited for it. So
    each child that is still running reads its own.
    """

    cpu_s: float = 0.0
    io: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def now(cls) -> Self:
        """Return the usage of this process since its start."""
        return cls(io=_process_io(), cpu_s=time.process_time())

    def __sub__(self, before: Usage) -> Usage:
        """Return the usage since `before`."""
        grown = {name: value - before.io[name] for name, value in self.io.items()}
        return Usage(cpu_s=self.cpu_s - before.cpu_s, io=grown)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Growth of time and counters since `began_s` of time.perf_counter.

    `system_cpu_s` counts every process and the kernel. `readings` of the device's counter have
    seconds and bytes since the start; the last one is at the end. There are none without a sampler.
    `flushed`, of another machine, says whether its device flushed its cache; None for unknown.
    """

    began_s: float
    elapsed_s: float
    cpu_s: float
    system_cpu_s: float
    device: DeviceCounts
    interference: Interference
    readings: tuple[Reading, ...] = ()
    flushed: bool | None = None


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """All counters at one moment, except the clocks of this process."""

    busy_s: float
    steal_s: float
    memory_stall_s: float | None
    process: dict[str, int]
    device: DeviceCounters | None


class Counters:
    """Counts from its construction on; `stop` returns the growth of every counter.

    `began_s` is the moment of time.perf_counter at which the clock starts, if that is decided.
    """

    def __init__(
        self, device: DeviceMonitor, sampler: Sampler | None = None, began_s: float | None = None
    ) -> None:
        self._device, self._sampler = device, sampler
        self._before = self._read()
        self._cpu_before = time.process_time()
        self._began = time.perf_counter() if began_s is None else began_s

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    def flushes(self) -> int | None:
        """Return the flushes of the device since the start; None without a device.

        The clock goes on: work that a writer left to other threads must not run untimed.
        """
        before, now = self._before.device, self._device.read()
        return now.flushes - before.flushes if now and before else None

    def stop(self, others: Sequence[Usage] = (), ended_s: float | None = None) -> Counted:
        """Return the growth of all counters, with the usage of `others`.

        The clock is read first: reading the files of /proc takes time too. `ended_s` is the moment
        of time.perf_counter at which it stops, if that was earlier.
        """
        elapsed = self.elapsed_s() if ended_s is None else ended_s - self._began
        cpu = time.process_time() - self._cpu_before
        before, now = self._before, self._read()
        moved = now.device - before.device if now.device and before.device else None
        own = {name: now.process[name] - before.process[name] for name in now.process}
        for one in others:
            own = {name: value + one.io[name] for name, value in own.items() if name in one.io}
        device = DeviceCounts(
            read_bytes=moved.read_bytes if moved else None,
            write_bytes=moved.write_bytes if moved else None,
            process_read_bytes=own.get("read_bytes"),
            process_write_bytes=own.get("write_bytes"),
        )
        return Counted(
            began_s=self._began,
            elapsed_s=elapsed,
            cpu_s=cpu + sum(one.cpu_s for one in others),
            system_cpu_s=now.busy_s - before.busy_s,
            device=device,
            interference=_interference(
                now.steal_s - before.steal_s,
                None
                if now.memory_stall_s is None or before.memory_stall_s is None
                else now.memory_stall_s - before.memory_stall_s,
                device,
            ),
            readings=self._readings(now, elapsed),
        )

    def _readings(self, now: _Machine, elapsed_s: float) -> tuple[Reading, ...]:
        first, last = self._before.device, now.device
        if self._sampler is None or first is None or last is None:
            return ()
        between = self._sampler.readings(self._began, self._began + elapsed_s)
        counters: list[tuple[float, Reading | DeviceCounters]] = [
            *((one.at_s - self._began, one) for one in between),
            (elapsed_s, last),
        ]
        return tuple(
            Reading(
                at_s=at_s,
                read_bytes=one.read_bytes - first.read_bytes,
                write_bytes=one.write_bytes - first.write_bytes,
            )
            for at_s, one in counters
        )

    def _read(self) -> _Machine:
        busy_s, steal_s = _cpu_times_s()
        return _Machine(
            busy_s=busy_s,
            steal_s=steal_s,
            memory_stall_s=memory_stall_s(),
            process=_process_io(),
            device=self._device.read(),
        )


def _interference(
    steal_s: float | None, memory_stall_s: float | None, device: DeviceCounts
) -> Interference:
    """Return it with the bytes that other processes moved, at least 0.

    The kernel counts buffered writes of a process when it dirties pages. The device counts them
    when they are written back, so its counter may be behind.
    """

    def foreign(device: int | None, process: int | None) -> int | None:
        return None if device is None or process is None else max(0, device - process)

    return Interference(
        steal_s=steal_s,
        memory_stall_s=memory_stall_s,
        foreign_read_bytes=foreign(device.read_bytes, device.process_read_bytes),
        foreign_write_bytes=foreign(device.write_bytes, device.process_write_bytes),
    )


def _process_io() -> dict[str, int]:
    """Return the counters of /proc/self/io; empty for a kernel without I/O accounting.

    read_bytes and write_bytes are the bytes that the process caused storage to read, and will cause
    it to write.
    """
    try:
        with open("/proc/self/io") as file:
            pairs = dict(line.split(": ") for line in file)
        return {name: int(pairs[name]) for name in ("read_bytes", "write_bytes")}
    except (OSError, KeyError, ValueError):
        return {}


def _cpu_times_s() -> tuple[float, float]:
    """Return (busy seconds, seconds stolen by the hypervisor), over all CPUs.

    Neither waiting for I/O nor stolen time is busy. The last columns of the line (guest times) are
    not read: the kernel has counted them in user and nice already.
    """
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    busy = sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT] - ticks[_STEAL]
    return busy * _TICK_S, ticks[_STEAL] * _TICK_S


N = TypeVar("N", int, float)


def over_machines(counted: Counted, others: Sequence[Counted]) -> Counted:
    """Return `counted` of this machine, whose `device` counts there, with those of the others.

    The bytes of devices are None unless every machine counts them: a part of the machines cannot
    show that all bytes reached the storage.
    """
    if not others:
        return counted
    every = [counted, *others]
    device = replace(
        counted.device,
        read_bytes=_sum([one.device.read_bytes for one in every]),
        write_bytes=_sum([one.device.write_bytes for one in every]),
    )
    return replace(
        counted,
        system_cpu_s=sum(one.system_cpu_s for one in every),
        device=device,
        interference=_interference(
            _sum([one.interference.steal_s for one in every]),
            _sum([one.interference.memory_stall_s for one in every]),
            device,
        ),
    )


def _sum(values: Sequence[N | None]) -> N | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


INTERVAL_S = 0.1


def make_series(operation: Operation, counted: Counted, ticks: Mapping[int, int] | None) -> Series:
    """Return the series of the operation that `counted` measured.

    `ticks` are the bytes that its writer completed (see `Transfer.completed`); None for a writer
    that does not count them.
    """
    points = [
        (one.at_s, one.write_bytes if operation == "save" else one.read_bytes)
        for one in counted.readings
    ]
    return Series(
        interval_s=INTERVAL_S,
        completed=None if ticks is None else by_ticks(ticks, counted.began_s, counted.elapsed_s),
        counter="device" if points else None,
        counted=by_growth(points) if points else None,
    )


def by_growth(points: Sequence[tuple[float, int]]) -> tuple[int, ...]:
    """Return the growth of a counter in each interval, from (seconds, growth) since the start.

    The last point is the end. Between two points the growth is interpolated linearly.
    """
    elapsed_s = points[-1][0]
    times, grown = zip((0.0, 0), *points, strict=True)
    ends = [min(i * INTERVAL_S, elapsed_s) for i in range(_count(elapsed_s) + 1)]
    at_ends = np.rint(np.interp(ends, times, grown)).astype(np.int64)
    return tuple(int(growth) for growth in np.diff(at_ends))


def by_ticks(ticks: Mapping[int, int], began_s: float, elapsed_s: float) -> tuple[int, ...]:
    """Return the bytes of `ticks` in each interval of `elapsed_s` seconds since `began_s`.

    Raises ValueError for bytes before the clock began or after its end.
    """
    bins = [0] * _count(elapsed_s)
    for tick, moved in ticks.items():
        begin_s = tick * TICK_S - began_s
        if not -TICK_S <= begin_s <= elapsed_s:
            raise ValueError(f"{moved} bytes at {begin_s:.3f} s of a clock of {elapsed_s:.3f} s")
        bins[min(max(int(begin_s / INTERVAL_S), 0), len(bins) - 1)] += moved
    return tuple(bins)


def _count(elapsed_s: float) -> int:
    return max(1, math.ceil(elapsed_s / INTERVAL_S))
