"""Counters: CPU and I/O of process, machine and device, read around a timed operation."""

from __future__ import annotations

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

__all__ = ["Counted", "Counters", "Growth", "Monitor", "Usage"]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT, _STEAL = 3, 4, 7  # columns of the cpu line of /proc/stat


class Monitor(Protocol):
    """Reads the counters of a device; see `iobench.environment.DeviceMonitor`."""

    @property
    def files(self) -> Sequence[Path]:
        """The kernel's files that show them; empty where there is no device."""

    def read(self) -> DeviceCounters | None:
        """The counters now; None where there are none."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """CPU seconds of a process and its counters of /proc/self/io, which may be missing."""

    cpu_s: float = 0.0
    io: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def now(cls) -> Self:
        """Of this process, since it began."""
        return cls(io=_process_io(), cpu_s=time.process_time())

    def __sub__(self, before: Usage) -> Usage:
        """What was used since `before`."""
        grown = {name: value - before.io[name] for name, value in self.io.items()}
        return Usage(cpu_s=self.cpu_s - before.cpu_s, io=grown)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How the counter that `source` names (see `Sampler`) grew.

    `readings` are since the start: seconds and bytes, the first after it, the last at the end.
    """

    source: CounterSource
    readings: tuple[Reading, ...]


@dataclass(frozen=True, kw_only=True)
class Counted:
    """How far time and counters moved since `began_s` of time.perf_counter.

    `system_cpu_s` counts every process and the kernel; `growth` is None without a sampler.
    """

    began_s: float
    elapsed_s: float
    cpu_s: float
    system_cpu_s: float
    device: DeviceCounts
    interference: Interference
    growth: Growth | None


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """All but the clocks of this process, at one moment."""

    busy_s: float
    steal_s: float
    memory_stall_s: float | None
    process: dict[str, int]
    device: DeviceCounters | None

    def reading(self, source: CounterSource, at_s: float) -> Reading | None:
        """What the sampler would have read."""
        if source == "device" and self.device is not None:
            read, write = self.device.read_bytes, self.device.write_bytes
        elif source == "process" and self.process:
            read, write = self.process["rchar"], self.process["wchar"]
        else:
            return None
        return Reading(at_s=at_s, read_bytes=read, write_bytes=write)


class Counters:
    """Starts counting when made; `stop` returns how far every counter moved since."""

    def __init__(self, device: Monitor, sampler: Sampler | None = None) -> None:
        self._device, self._sampler = device, sampler
        self._before = self._read()
        self._cpu_before = time.process_time()
        self._began = time.perf_counter()

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    def stop(self, others: Sequence[Usage] = ()) -> Counted:
        """Return how far all moved, with what `others` used. The clock is read first."""
        elapsed = self.elapsed_s()
        cpu = time.process_time() - self._cpu_before
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
                foreign_read_bytes=_foreign(moved.read_bytes if moved else None, read),
                foreign_write_bytes=_foreign(moved.write_bytes if moved else None, write),
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
        between = self._sampler.readings(self._began, self._began + elapsed_s)
        since = [
            Reading(
                at_s=at_s,
                read_bytes=one.read_bytes - first.read_bytes,
                write_bytes=one.write_bytes - first.write_bytes,
            )
            for at_s, one in [
                *((one.at_s - self._began, one) for one in between),
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


def _foreign(device: int | None, process: int | None) -> int | None:
    """What others moved; the process may be charged for what reaches the device a little later."""
    return None if device is None or process is None else max(0, device - process)


def _process_io() -> dict[str, int]:
    """The counters of /proc/self/io; empty where the kernel does not account for it."""
    try:
        with open("/proc/self/io") as file:
            pairs = dict(line.split(": ") for line in file)
        return {name: int(pairs[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes")}
    except (OSError, KeyError, ValueError):
        return {}


def _cpu_times_s() -> tuple[float, float]:
    """(seconds not spent idling or waiting for I/O, seconds stolen by others), over all CPUs."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    busy = sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT]
    return busy * _TICK_S, ticks[_STEAL] * _TICK_S
