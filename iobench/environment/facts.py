"""Machine, storage and devices in words: for doctor, reports, comparisons and `writer.toml`.

The descriptions may come from a record: facts that it lacks are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from iobench.environment.machine import part_of
from iobench.units import KIB, format_rate, format_size


@dataclass(frozen=True)
class Fact:
    """One fact in words. `subject` is that of advice about it; empty where nothing checks it."""

    name: str
    words: str
    subject: str = ""


def main_facts(machine: Mapping[str, Any]) -> dict[str, str | None]:
    """Return what decides the figures of a machine; None for what the record lacks."""
    cpu, total = part_of(machine, "cpu"), part_of(machine, "memory").get("total_bytes")
    gpus = [str(one.get("name")) for one in _gpus(machine)]
    known = {
        "host": machine.get("hostname"),
        "kernel": machine.get("kernel"),
        "CPU": cpu.get("model"),
        "CPUs": cpu.get("usable_cpus"),
        "memory": _size(total),
        "GPUs": ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)),
    }
    return {name: str(one) if one else None for name, one in known.items()}


def machine_words(machine: Mapping[str, Any]) -> list[str]:
    """Return the known facts for one line: `vm`, `Linux 6.18`, `AMD EPYC`, `2 CPUs`."""
    forms = {"kernel": "Linux {}", "CPUs": "{} CPUs", "memory": "{} memory"}
    return [forms.get(name, "{}").format(one) for name, one in main_facts(machine).items() if one]


def storage_words(storage: Mapping[str, Any]) -> list[str]:
    """Return file system and device for one line: `ext4`, `Samsung 990 PRO`."""
    device = part_of(storage, "device")
    known = storage.get("fs_type") or storage.get("kind"), device.get("model") or device.get("name")
    return [str(fact) for fact in known if fact]


def storage_line(storage: Mapping[str, Any]) -> str:
    """Return `ext4 on vda` or `s3 at http://127.0.0.1:9000`."""
    endpoint, device = storage.get("endpoint"), part_of(storage, "device")
    below = device.get("name") or endpoint or storage.get("source")
    joined = f" {'at' if endpoint else 'on'} {below}" if below else ""
    return f"{storage.get('fs_type') or storage.get('kind')}{joined}"


def machine_facts(machine: Mapping[str, Any]) -> list[Fact]:
    """Return host, CPU, memory, kernel, versions and GPUs, in the order of `iobench doctor`."""
    memory, versions, cache, ring, virtual = (
        part_of(machine, name)
        for name in ("memory", "versions", "page_cache", "io_uring", "virtualisation")
    )
    rate, cuda = memory.get("new_pages_bytes_per_s"), versions.get("torch_cuda")
    torch = _words(versions.get("torch"), cuda and f"built for CUDA {cuda}")
    dirty = (f"{_dirty(cache, 'background_')} background", f"{_dirty(cache, '')} hard")
    container, hypervisor = virtual.get("container"), virtual.get("hypervisor")
    known: list[tuple[Any, ...]] = [
        ("host", machine.get("hostname")),
        ("cpu", _cpu(part_of(machine, "cpu"))),
        ("governor", part_of(machine, "cpu").get("governor"), "cpu.governor"),
        ("memory", _memory(memory, part_of(machine, "cgroup")), "memory"),
        ("new pages", rate and format_rate(rate), "memory.pages"),
        ("dirty limits", ", ".join(dirty) if cache else None),
        (
            "runs in",
            _words(
                container and f"{container} container",
                hypervisor and f"virtual machine ({hypervisor})",
            ),
        ),
        ("system", machine.get("distribution")),
        ("kernel", machine.get("kernel")),
        ("io_uring", "a ring was set up" if ring.get("works") else ring.get("reason"), "io_uring"),
        ("python", versions.get("python")),
        ("torch", (torch or "missing") if versions else None, "torch"),
        ("fio", (versions.get("fio") or "missing") if versions else None, "fio"),
        *(
            (
                "gpu",
                _words(
                    gpu.get("name"),
                    _size(gpu.get("memory_bytes")),
                    f"driver {gpu.get('driver') or 'unknown'}",
                ),
            )
            for gpu in _gpus(machine)
        ),
        ("gpudirect", part_of(machine, "gds").get("state"), "gds" if _gpus(machine) else ""),
        ("fingerprint", machine.get("fingerprint")),
    ]
    return [Fact(name, str(words), *subject) for name, words, *subject in known if words]


def _cpu(cpu: Mapping[str, Any]) -> str:
    cpus, nodes = cpu.get("usable_cpus"), cpu.get("numa_nodes")
    return _words(
        cpu.get("model"),
        cpus and f"{cpus} of {cpu.get('logical_cpus') or cpus} CPUs",
        nodes and nodes > 1 and f"{nodes} NUMA nodes",
    )


def _memory(memory: Mapping[str, Any], group: Mapping[str, Any]) -> str:
    return _words(
        _size(memory.get("total_bytes")),
        _size(memory.get("available_bytes"), "{} available"),
        _size(group.get("memory_limit_bytes"), "control group allows {}"),
        _size(memory.get("swap_total_bytes"), "swap {}"),
    )


def storage_facts(storage: Mapping[str, Any]) -> list[Fact]:
    """Return kind, mount, free space, and the device with those below it."""
    options, upper = storage.get("mount_options"), part_of(storage, "upper")
    used, inodes = storage.get("used_ratio"), storage.get("inodes_free")
    known: list[tuple[Any, ...]] = [
        ("kind", storage.get("kind"), "storage.kind"),
        ("file system", storage.get("fs_type") and _mounted(storage)),
        (
            "mount options",
            ", ".join(map(str, options)) if isinstance(options, list) else None,
            "storage.options",
        ),
        ("upper directory", _mounted(upper) if upper else None),
        (
            "free space",
            _words(
                _size(storage.get("free_bytes"), f"{{}} of {_size(storage.get('total_bytes'))}"),
                None if used is None else f"{used:.0%} used",
            ),
            "storage.free",
        ),
        ("free inodes", None if inodes is None else f"{inodes}", "storage.inodes"),
        *_device_facts(part_of(storage, "device"), depth=0),
    ]
    return [Fact(name, str(words), *subject) for name, words, *subject in known if words]


def device_words(one: Mapping[str, Any]) -> str:
    """Return what stays of a device: `nvme Samsung 990 PRO 931.51 GiB`; `` if nothing is known."""
    return " ".join(
        str(fact)
        for fact in (one.get("type"), one.get("model"), _size(one.get("size_bytes")))
        if fact
    )


def _device_facts(device: Mapping[str, Any], depth: int) -> Iterator[tuple[str, ...]]:
    if not device:
        return
    pad, file = "  " * depth, device.get("backing_file")
    words = _words(
        *(device.get(name) for name in ("name", "type", "transport", "model")),
        _size(device.get("size_bytes")),
        file and f"file {file}",
    )
    yield f"{pad}device", words, "" if depth else "storage.device"
    kilobytes = (("largest", "max_sectors_kb"), ("read-ahead", "read_ahead_kb"))
    sizes = [(name, device.get(field)) for name, field in kilobytes]
    limits = [
        ("scheduler", device.get("scheduler")),
        ("requests", device.get("nr_requests")),
        *((name, _size(size * KIB)) for name, size in sizes if size),
        ("cache", device.get("write_cache")),
    ]
    yield f"{pad}queue", _words(*(f"{name} {value}" for name, value in limits if value))
    logical, physical = device.get("logical_block_bytes"), device.get("physical_block_bytes")
    if logical and physical:
        yield f"{pad}blocks", f"{logical} B logical, {physical} B physical"
    below = device.get("backing")
    for part in below if isinstance(below, list) else ():
        yield from _device_facts(part, depth + 1)


def _gpus(machine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    listed = machine.get("gpus")
    return [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []


def _mounted(storage: Mapping[str, Any]) -> str:
    source = storage.get("source")
    where = f"{storage.get('fs_type')} on {storage.get('mount_point')}"
    return f"{where} from {source}" if source else where


def _dirty(cache: Mapping[str, Any], which: str) -> str:
    """Return the limit in force: bytes if they are set, else percent of available memory."""
    return _size(cache.get(f"dirty_{which}bytes")) or f"{cache.get(f'dirty_{which}ratio')}%"


def _size(value: Any, form: str = "{}") -> str | None:
    return form.format(format_size(value)) if isinstance(value, int) and value else None


def _words(*known: Any) -> str:
    return ", ".join(str(one) for one in known if one)
