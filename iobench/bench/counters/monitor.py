"""Counters: CPU time and I/O of process, machine and device, around a timed operation."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from iobench.bench.counters.sampler import CounterSource, Reading, Sampler
from iobench.environment import DeviceCounters
from iobench.environment.memory import memory_stall_s
from iobench.results.records import DeviceCounts, Interference

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT, _STEAL = 3, 4, 7  # columns of the cpu line of /proc/stat


class Monitor(Protocol):
    """Reads the counters of a device; see `iobench.environment.DeviceMonitor`."""

    @property
    def files(self) -> Sequence[Path]:
        """The kernel's files that show the counters; empty where there is no device."""

    def read(self) -> DeviceCounters | None:
        """Return the counters now; None where there is no device."""


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
class Growth:
    """Growth of the counter that `source` names (see `Sampler`).

    `readings` have seconds and bytes since the start. The last one is at the end.
    """

    source: CounterSource
    readings: tuple[Reading, ...]


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Growth of time and counters since `began_s` of time.perf_counter.

    `system_cpu_s` counts every process and the kernel; `growth` is None without a sampler.
    `flushed`, of another machine, says whether its device flushed its cache; None for unknown.
    """

    began_s: float
    elapsed_s: float
    cpu_s: float
    system_cpu_s: float
    device: DeviceCounts
    interference: Interference
    growth: Growth | None
    flushed: bool | None = None


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """All counters at one moment, except the clocks of this process."""

    busy_s: float
    steal_s: float
    memory_stall_s: float | None
    process: dict[str, int]
    device: DeviceCounters | None

    def reading(self, source: CounterSource, at_s: float) -> Reading | None:
        """Return a reading like the sampler's; None where the kernel has no such counter."""
        if source == "device" and self.device is not None:
            read, write = self.device.read_bytes, self.device.write_bytes
        elif source == "process" and self.process:
            read, write = self.process["rchar"], self.process["wchar"]
        else:
            return None
        return Reading(at_s=at_s, read_bytes=read, write_bytes=write)


class Counters:
    """Counts from its construction on; `stop` returns the growth of every counter.

    `began_s` is the moment of time.perf_counter at which the clock starts, if that is decided.
    """

    def __init__(
        self, device: Monitor, sampler: Sampler | None = None, began_s: float | None = None
    ) -> None:
        self._device, self._sampler = device, sampler
        self._check_at, self._check_s = math.inf, 0.0
        self._before = self._read()
        self._cpu_before = time.process_time()
        self._began = time.perf_counter() if began_s is None else began_s

    def elapsed_s(self) -> float:
        """Seconds since the start, without the check."""
        return self._on_clock(time.perf_counter())

    def flushes(self) -> int | None:
        """Return the flushes of the device since the start; None without a device.

        Call it once. The clock stops during this check, but only for the CPU time of this thread:
        work that a writer left to other threads must not run while the clock stands still.
        """
        self._check_at, began_s = time.perf_counter(), time.thread_time()
        before, now = self._before.device, self._device.read()
        self._check_s = time.thread_time() - began_s
        return now.flushes - before.flushes if now and before else None

    def _on_clock(self, at_s: float) -> float:
        """Return the seconds from the start to a moment of time.perf_counter, less the check."""
        return at_s - self._began - min(max(0.0, at_s - self._check_at), self._check_s)

    def stop(self, others: Sequence[Usage] = (), ended_s: float | None = None) -> Counted:
        """Return the growth of all counters, with the usage of `others`.

        The clock is read first: reading the files of /proc takes time too. `ended_s` is the moment
        of time.perf_counter at which it stops, if that was earlier.
        """
        elapsed = self.elapsed_s() if ended_s is None else self._on_clock(ended_s)
        cpu = time.process_time() - self._cpu_before - self._check_s
        before, now = self._before, self._read()
        moved = now.device - before.device if now.device and before.device else None
        own = {name: now.process[name] - before.process[name] for name in now.process}
        for one in others:
            own = {name: value + one.io[name] for name, value in own.items() if name in one.io}
        read, write = own.get("read_bytes"), own.get("write_bytes")
        return Counted(
            began_s=self._began,
            elapsed_s=elapsed,
            cpu_s=cpu + sum(one.cpu_s for one in others),
            system_cpu_s=now.busy_s - before.busy_s,
            device=DeviceCounts(
                read_bytes=moved.read_bytes if moved else None,
                write_bytes=moved.write_bytes if moved else None,
                process_read_bytes=read,
                process_write_bytes=write,
            ),
            interference=Interference(
                steal_s=now.steal_s - before.steal_s,
                memory_stall_s=None
                if now.memory_stall_s is None or before.memory_stall_s is None
                else now.memory_stall_s - before.memory_stall_s,
                foreign_read_bytes=foreign_bytes(moved.read_bytes if moved else None, read),
                foreign_write_bytes=foreign_bytes(moved.write_bytes if moved else None, write),
            ),
            growth=self._growth(now, elapsed),
        )

    def _growth(self, now: _Machine, elapsed_s: float) -> Growth | None:
        """None where the kernel does not count what the sampler reads."""
        if self._sampler is None:
            return None
        source = self._sampler.source
        first, last = self._before.reading(source, 0.0), now.reading(source, elapsed_s)
        if first is None or last is None:
            return None
        end = self._began + elapsed_s + self._check_s
        between = self._sampler.readings(self._began, end)
        since = [
            Reading(
                at_s=at_s,
                read_bytes=one.read_bytes - first.read_bytes,
                write_bytes=one.write_bytes - first.write_bytes,
            )
            for at_s, one in [
                *((self._on_clock(one.at_s), one) for one in between),
                (elapsed_s, last),
            ]
        ]
        return Growth(source=source, readings=tuple(since))

    def _read(self) -> _Machine:
        busy_s, steal_s = _cpu_times_s()
        return _Machine(
            busy_s=busy_s,
            steal_s=steal_s,
            memory_stall_s=memory_stall_s(),
            process=_process_io(),
            device=self._device.read(),
        )


def foreign_bytes(device: int | None, process: int | None) -> int | None:
    """Return the bytes that other processes moved, at least 0.

    The kernel counts buffered writes of a process when it dirties pages. The device counts them
    when they are written back, so its counter may be behind.
    """
    return None if device is None or process is None else max(0, device - process)


def _process_io() -> dict[str, int]:
    """Return the counters of /proc/self/io; empty for a kernel without I/O accounting.

    rchar and wchar are the bytes of read and write calls, from the page cache too. read_bytes and
    write_bytes are the bytes that the process caused storage to read, and will cause it to write.
    """
    try:
        with open("/proc/self/io") as file:
            pairs = dict(line.split(": ") for line in file)
        return {name: int(pairs[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes")}
    except (OSError, KeyError, ValueError):
        return {}


def _cpu_times_s() -> tuple[float, float]:
    """Return (busy seconds, seconds stolen by the hypervisor), over all CPUs.

    Waiting for I/O is not busy. The last columns of the line (guest times) are not read: the
    kernel has counted them in user and nice already.
    """
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    busy = sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT]
    return busy * _TICK_S, ticks[_STEAL] * _TICK_S
