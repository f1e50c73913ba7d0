"""The facts that must be equal in two runs that are compared, and those that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from iobench.bench.judging.verdict import repeats_every
from iobench.environment.storage import leaf_devices
from iobench.peers import PREFIX
from iobench.results import Run
from iobench.units import GIB, format_size

__all__ = ["part_of", "unlike"]


def unlike(old: Run, new: Run) -> list[str]:
    """Return in words the differences that make the figures of two runs incomparable.

    Compared are the machine (CPU, CPUs, memory, GPUs), kernel, file system, devices, workload, rank
    and size. The rules of the run are compared too: CRC32, whether data repeat, and whether the
    measured time of a restore includes the allocation of its memory. The host's name, free space
    and the versions of packages may differ: the comparison may be about them.
    """
    before, after = dict(_facts(old)), dict(_facts(new))
    return [
        f"{name}: {before[name]} before, {after[name]} now"
        for name in before
        if name in after and before[name] != after[name]
    ]


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the facts that must be equal, as name and words; `unknown` where a record lacks one."""
    machine = run.environment.machine
    cpu, memory = part_of(machine, "cpu"), part_of(machine, "memory")
    yield "CPU", _word(cpu.get("model"))
    yield "CPUs", _word(cpu.get("usable_cpus"))
    total = memory.get("total_bytes")
    yield "memory", f"{round(total / GIB)} GiB" if isinstance(total, int) else _word(None)
    gpus = machine.get("gpus")
    names = [gpu.get("name") for gpu in gpus if isinstance(gpu, Mapping)] if gpus else []
    yield "GPUs", ", ".join(sorted(map(str, names))) or "none"
    yield "kernel", _word(machine.get("kernel"))
    storages = run.environment.storages
    yield "targets", ", ".join(sorted(storages)) or "one"
    for target, storage in (storages or {"": run.environment.storage}).items():
        of = f" of {target}" if target else ""
        yield f"file system{of}", _word(storage.get("fs_type"))
        devices = ", ".join(map(_device, leaf_devices(storage.get("device"))))
        yield f"device{of}", devices or _word(None)
    yield "workload", f"{run.workload.name}, rank {run.workload.rank}"
    yield "size", f"{format_size(run.workload.bytes)} ({run.workload.bytes} bytes)"
    period = repeats_every(run)
    yield "repeating data", "no" if period is None else f"every {format_size(period)}"
    yield from _rules(run.plan)


def _rules(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    crc, writers = plan.get("crc32"), plan.get("writers")
    yield "CRC32 of torch files", _yes(crc)
    names = [one.get("name") for one in writers or () if isinstance(one, Mapping)]
    peers = any(str(name).startswith(PREFIX) for name in names)
    yield "restores into new memory, as with peers", _yes(peers if names else None)


def _device(leaf: Mapping[str, Any]) -> str:
    size = leaf.get("size_bytes")
    known = [leaf.get("type"), leaf.get("model"), format_size(size) if size else None]
    return " ".join(str(fact) for fact in known if fact)


def part_of(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the facts under `name`; empty where a record lacks them."""
    part = values.get(name)
    return part if isinstance(part, Mapping) else {}


def _yes(value: Any) -> str:
    return _word(value if value is None else "yes" if value else "no")


def _word(value: Any) -> str:
    return "unknown" if value is None else str(value)
