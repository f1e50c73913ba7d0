"""Description of the CPU: model, cores, NUMA nodes, governor, and whether it is virtual."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path

from iobench.environment.facts import joined
from iobench.environment.kernelfs import read_text


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The CPUs of a machine. `physical_cores` is None if the kernel reports no topology."""

    model: str | None = None
    architecture: str | None = None
    logical_cpus: int | None = None
    usable_cpus: int | None = None
    physical_cores: int | None = None
    numa_nodes: int | None = None
    governor: str | None = None
    driver: str | None = None
    virtual: bool | None = None

    def __str__(self) -> str:
        """`AMD EPYC, 2 of 4 CPUs, 2 NUMA nodes`."""
        cpus, nodes = self.usable_cpus, self.numa_nodes
        return joined(
            self.model,
            cpus and f"{cpus} of {self.logical_cpus or cpus} CPUs",
            nodes and nodes > 1 and f"{nodes} NUMA nodes",
        )


@dataclass(frozen=True, kw_only=True)
class Virtualisation:
    """Hypervisor and container if they can be detected; None on bare metal."""

    hypervisor: str | None = None
    container: str | None = None
    product: str | None = None


def parse_cpuinfo(text: str) -> Cpu:
    """Return model, physical core count and hypervisor flag from the text of /proc/cpuinfo.

    Arm kernels print no model name; the implementer and part numbers replace it.
    """
    cores: set[tuple[str, str]] = set()
    facts: dict[str, str] = {}
    for block in text.split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
        cpu = {key.strip(): value.strip() for key, _, value in pairs}
        facts = facts or cpu
        if "core id" in cpu:
            cores.add((cpu.get("physical id", "0"), cpu["core id"]))
    model = facts.get("model name") or facts.get("cpu model")
    if not model and "CPU implementer" in facts:
        model = f"arm {facts['CPU implementer']} part {facts.get('CPU part', '?')}"
    return Cpu(
        model=model,
        physical_cores=len(cores) or None,
        virtual="hypervisor" in facts.get("flags", "").split(),
    )


def count_ranges(text: str | None) -> int | None:
    """Return how many numbers a kernel list of ranges has: 5 for `0-3,8`."""
    if not text:
        return None
    total = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total


def describe_cpu() -> Cpu:
    """Describe model, cores (all, usable by this process, physical), NUMA nodes and governor."""
    cpu = parse_cpuinfo(read_text("/proc/cpuinfo") or "")
    frequency = Path("/sys/devices/system/cpu/cpu0/cpufreq")
    return replace(
        cpu,
        model=cpu.model or platform.machine(),
        architecture=platform.machine(),
        logical_cpus=os.cpu_count(),
        usable_cpus=len(os.sched_getaffinity(0)),
        numa_nodes=count_ranges(read_text("/sys/devices/system/node/online")),
        governor=read_text(frequency / "scaling_governor"),
        driver=read_text(frequency / "scaling_driver"),
    )


def describe_virtualisation(*, virtual: bool) -> Virtualisation:
    """Describe hypervisor and container; `virtual` is what the CPU says."""
    vendor = read_text("/sys/class/dmi/id/sys_vendor")
    product = read_text("/sys/class/dmi/id/product_name")
    hypervisor = read_text("/sys/hypervisor/type")
    if hypervisor is None and virtual:
        hypervisor = " ".join(word for word in (vendor, product) if word) or "unnamed"
    marks = {"docker": "/.dockerenv", "podman": "/run/.containerenv"}
    container = next((name for name, mark in marks.items() if Path(mark).exists()), None)
    if container is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        container = "kubernetes"
    return Virtualisation(hypervisor=hypervisor, container=container, product=product)
