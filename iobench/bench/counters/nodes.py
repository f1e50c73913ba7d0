"""The counters of several machines during an operation, and their sum over a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from iobench.bench.counters.monitor import Counted, Counters, foreign_bytes
from iobench.results.records import DeviceCounts, Interference

N = TypeVar("N", int, float)


def counted_here(counters: Counters, *, device_counts: bool, flush_counts: bool) -> Counted:
    """Stop `counters` of this machine, for another one; without a device that does not count."""
    flushes = counters.flushes() if flush_counts else None
    counted = counters.stop()
    device = counted.device
    if not device_counts:
        device = replace(device, read_bytes=None, write_bytes=None)
    return replace(counted, device=device, flushed=None if flushes is None else flushes > 0)


def over_machines(counted: Counted, others: Sequence[Counted]) -> Counted:
    """Return `counted` of this machine, whose `device` counts there, with those of the others.

    The bytes of devices are None unless every machine counts them: a part of the machines cannot
    show that all bytes reached the storage.
    """
    if not others:
        return counted
    every, device = [counted, *others], counted.device
    read = _sum([one.device.read_bytes for one in every])
    write = _sum([one.device.write_bytes for one in every])
    process = device.process_read_bytes, device.process_write_bytes
    return replace(
        counted,
        system_cpu_s=sum(one.system_cpu_s for one in every),
        device=DeviceCounts(
            read_bytes=read,
            write_bytes=write,
            process_read_bytes=process[0],
            process_write_bytes=process[1],
        ),
        interference=Interference(
            steal_s=_sum([one.interference.steal_s for one in every]),
            memory_stall_s=_sum([one.interference.memory_stall_s for one in every]),
            foreign_read_bytes=foreign_bytes(read, process[0]),
            foreign_write_bytes=foreign_bytes(write, process[1]),
        ),
    )


def _sum(values: Sequence[N | None]) -> N | None:
    """Return the sum, or None if one of them is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
