"""Counters: CPU and I/O of process, machine and device, read around a timed operation."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Protocol

from iobench.environment import DeviceCounters
from iobench.results.records import DeviceCounts

__all__ = ["Counted", "Counters", "Monitor"]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT = 3, 4  # columns of the cpu line of /proc/stat


class Monitor(Protocol):
    """Reads the counters of a device; see `iobench.environment.DeviceMonitor`."""

    def read(self) -> DeviceCounters | None:
        """The counters now; None where there are none."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """How far time and counters moved. `system_cpu_s` counts every process and the kernel."""

    elapsed_s: float
    cpu_s: float
    system_cpu_s: float
    device: DeviceCounts


class Counters:
    """Starts counting when made; `stop` tells how far everything moved since."""

    def __init__(self, device: Monitor) -> None:
        self._device = device
        self._device_before = device.read()
        self._process_before = _process_io()
        self._system_before = _system_cpu_s()
        self._cpu_before = time.process_time()
        self._began = time.perf_counter()

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    def stop(self) -> Counted:
        """What has moved. The clock is read first."""
        elapsed = self.elapsed_s()
        cpu = time.process_time() - self._cpu_before
        system = _system_cpu_s() - self._system_before
        process, device = _process_io(), self._device.read()
        moved = device - self._device_before if device and self._device_before else None
        read, write = (
            (process[0] - self._process_before[0], process[1] - self._process_before[1])
            if process and self._process_before
            else (None, None)
        )
        return Counted(
            elapsed_s=elapsed,
            cpu_s=cpu,
            system_cpu_s=system,
            device=DeviceCounts(
                read_bytes=moved.read_bytes if moved else None,
                write_bytes=moved.write_bytes if moved else None,
                process_read_bytes=read,
                process_write_bytes=write,
            ),
        )


def _process_io() -> tuple[int, int] | None:
    """(read_bytes, write_bytes) of /proc/self/io; None where the kernel does not account for it."""
    try:
        with open("/proc/self/io") as file:
            values = dict(line.split(": ") for line in file)
        return int(values["read_bytes"]), int(values["write_bytes"])
    except (OSError, KeyError, ValueError):
        return None


def _system_cpu_s() -> float:
    """CPU seconds spent on anything but idling and waiting for I/O, all CPUs together."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT]) * _TICK_S
