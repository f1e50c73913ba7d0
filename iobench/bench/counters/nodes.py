"""NodeCounts: the counters of another machine during an operation, and their sum over a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from iobench.bench.counters.monitor import Counted, Monitor, foreign_bytes
from iobench.bench.counters.monitor import Counters as _Counters
from iobench.environment import DeviceCounters
from iobench.results.records import DeviceCounts, Interference

__all__ = ["NodeCounter", "NodeCounts", "over_machines"]

N = TypeVar("N", int, float)


@dataclass(frozen=True, kw_only=True)
class NodeCounts:
    """Growth of the counters of one machine while its ranks moved their files.

    `device` is None where the target has no device there, or its counter does not count.
    `flushed` says whether the device flushed its cache; None where the kernel does not count that.
    """

    device: DeviceCounters | None
    system_cpu_s: float
    steal_s: float | None
    memory_stall_s: float | None
    flushed: bool | None = None


class NodeCounter:
    """Counts on this machine from its construction on."""

    def __init__(self, monitor: Monitor, *, device_counts: bool, flush_counts: bool) -> None:
        self._device_counts, self._flush_counts = device_counts, flush_counts
        self._counters = _Counters(monitor)

    def stop(self) -> NodeCounts:
        """Return the growth since the construction."""
        flushes = self._counters.flushes() if self._flush_counts else None
        counted = self._counters.stop()
        read, write = counted.device.read_bytes, counted.device.write_bytes
        device = None
        if self._device_counts and read is not None and write is not None:
            device = DeviceCounters(read_bytes=read, write_bytes=write, flushes=flushes or 0)
        return NodeCounts(
            device=device,
            system_cpu_s=counted.system_cpu_s,
            steal_s=counted.interference.steal_s,
            memory_stall_s=counted.interference.memory_stall_s,
            flushed=None if flushes is None else flushes > 0,
        )


def over_machines(counted: Counted, others: Sequence[NodeCounts]) -> Counted:
    """Return `counted` of this machine, whose `device` counts there, with those of the others.

    The bytes of devices are None unless every machine counts them: a part of the machines cannot
    show that all bytes reached the storage.
    """
    if not others:
        return counted
    own, device = counted.interference, counted.device
    devices = [one.device for one in others]
    read = _sum([device.read_bytes, *(one.read_bytes if one else None for one in devices)])
    write = _sum([device.write_bytes, *(one.write_bytes if one else None for one in devices)])
    process = device.process_read_bytes, device.process_write_bytes
    return replace(
        counted,
        system_cpu_s=counted.system_cpu_s + sum(one.system_cpu_s for one in others),
        device=DeviceCounts(
            read_bytes=read,
            write_bytes=write,
            process_read_bytes=process[0],
            process_write_bytes=process[1],
        ),
        interference=Interference(
            steal_s=_sum([own.steal_s, *(one.steal_s for one in others)]),
            memory_stall_s=_sum([own.memory_stall_s, *(one.memory_stall_s for one in others)]),
            foreign_read_bytes=foreign_bytes(read, process[0]),
            foreign_write_bytes=foreign_bytes(write, process[1]),
        ),
    )


def _sum(values: Sequence[N | None]) -> N | None:
    """Return the sum, or None if one of them is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
