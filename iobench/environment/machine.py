"""Description of the machine and its fingerprint."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from iobench.environment.cpu import Cpu, Virtualisation, describe_cpu, describe_virtualisation
from iobench.environment.facts import Fact, joined, size_of
from iobench.environment.gpu import Gds, Gpu, describe_gds, describe_gpus
from iobench.environment.memory import (
    ControlGroup,
    MachineMemory,
    PageCache,
    describe_cgroup,
    describe_memory,
    describe_page_cache,
)
from iobench.environment.software import describe_software, distribution
from iobench.environment.storage import OBJECT_STORE, Storage
from iobench.environment.uring import IoUring, describe_io_uring
from iobench.linux import kernel_version
from iobench.units import GIB, format_rate


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Host, kernel, CPU, memory, GPUs, versions and kernel settings.

    Facts that the machine does not report, or that an older record lacks, are None or empty.
    """

    hostname: str | None = None
    distribution: str | None = None
    kernel: str | None = None
    kernel_version: str | None = None
    cpu: Cpu = field(default_factory=Cpu)
    virtualisation: Virtualisation = field(default_factory=Virtualisation)
    memory: MachineMemory = field(default_factory=MachineMemory)
    cgroup: ControlGroup = field(default_factory=ControlGroup)
    page_cache: PageCache = field(default_factory=PageCache)
    io_uring: IoUring = field(default_factory=IoUring)
    gpus: tuple[Gpu, ...] = ()
    gds: Gds = field(default_factory=Gds)
    versions: Mapping[str, str | None] = field(default_factory=dict)
    fingerprint: str | None = None

    def main_facts(self) -> dict[str, str | None]:
        """Return what decides the figures, by name; None for what is unknown."""
        gpus = [one.name for one in self.gpus]
        return {
            "host": self.hostname,
            "kernel": self.kernel,
            "CPU": self.cpu.model,
            "CPUs": str(self.cpu.usable_cpus) if self.cpu.usable_cpus else None,
            "memory": size_of(self.memory.total_bytes),
            "GPUs": joined(*(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)))
            or None,
        }

    def words(self) -> list[str]:
        """Return these for one line: `vm`, `Linux 6.18`, `AMD EPYC`, `2 CPUs`."""
        forms = {"kernel": "Linux {}", "CPUs": "{} CPUs", "memory": "{} memory"}
        return [forms.get(name, "{}").format(one) for name, one in self.main_facts().items() if one]

    def facts(self) -> list[Fact]:
        """Return host, CPU, memory, kernel, versions and GPUs, in the order of `iobench doctor`."""
        rate, cuda = self.memory.new_pages_bytes_per_s, self.versions.get("torch_cuda")
        container, hypervisor = self.virtualisation.container, self.virtualisation.hypervisor
        torch = joined(self.versions.get("torch"), cuda and f"built for CUDA {cuda}")
        return Fact.known(
            [
                ("host", self.hostname),
                ("cpu", str(self.cpu)),
                ("governor", self.cpu.governor, "cpu.governor"),
                (
                    "memory",
                    joined(
                        size_of(self.memory.total_bytes),
                        size_of(self.memory.available_bytes, "{} available"),
                        size_of(self.cgroup.memory_limit_bytes, "control group allows {}"),
                        size_of(self.memory.swap_total_bytes, "swap {}"),
                    ),
                    "memory",
                ),
                ("new pages", rate and format_rate(rate), "memory.pages"),
                ("dirty limits", "" if self.page_cache == PageCache() else self.page_cache),
                (
                    "runs in",
                    joined(
                        container and f"{container} container",
                        hypervisor and f"virtual machine ({hypervisor})",
                    ),
                ),
                ("system", self.distribution),
                ("kernel", self.kernel),
                (
                    "io_uring",
                    "a ring was set up" if self.io_uring.works else self.io_uring.reason,
                    "io_uring",
                ),
                ("python", self.versions.get("python")),
                ("torch", self.versions and (torch or "missing"), "torch"),
                ("fio", self.versions and (self.versions.get("fio") or "missing"), "fio"),
                *(("gpu", str(gpu)) for gpu in self.gpus),
                ("gpudirect", self.gds.state, "gds" if self.gpus else ""),
                ("fingerprint", self.fingerprint),
            ]
        )


def describe_machine() -> Machine:
    """Describe this machine. Takes some 50 ms, most of it for running fio."""
    cpu, gpus = describe_cpu(), describe_gpus()
    machine = Machine(
        hostname=platform.node(),
        distribution=distribution(),
        kernel=platform.release(),
        kernel_version=".".join(map(str, kernel_version())),
        cpu=cpu,
        virtualisation=describe_virtualisation(virtual=cpu.virtual is True),
        memory=describe_memory(),
        cgroup=describe_cgroup(),
        page_cache=describe_page_cache(),
        io_uring=describe_io_uring(),
        gpus=gpus,
        gds=describe_gds(gpus=bool(gpus)),
        versions=describe_software(),
    )
    return replace(machine, fingerprint=fingerprint(machine))


def machine_fingerprint() -> str:
    """Return `describe_machine().fingerprint`, collecting only the facts that it covers."""
    return fingerprint(
        Machine(
            kernel_version=".".join(map(str, kernel_version())),
            cpu=describe_cpu(),
            memory=describe_memory(),
            cgroup=describe_cgroup(),
            gpus=describe_gpus(),
        )
    )


def fingerprint(machine: Machine, storage: Storage | None = None) -> str:
    """Return 12 hexadecimal digits that are equal for machines whose figures are comparable.

    They cover the CPU model, the usable CPUs, the lower of memory and control-group limit in whole
    GiB, the kernel's major.minor and the names of the GPUs. With `storage` they also cover type and
    kind of the file system, and for each device at the bottom of the stack its type, model,
    transport, size in whole GiB and scheduler. For an object store they cover endpoint, bucket and
    prefix. Host name, package versions and free space are not included.
    """
    bounds = machine.memory.total_bytes, machine.cgroup.memory_limit_bytes
    facts: dict[str, Any] = {
        "cpu": machine.cpu.model,
        "cpus": machine.cpu.usable_cpus,
        "memory_gib": _gib(min((one for one in bounds if one is not None), default=None)),
        "kernel": machine.kernel_version,
        "gpus": sorted(gpu.name for gpu in machine.gpus),
    }
    if storage is not None:
        facts["storage"] = [storage.kind, storage.fs_type]
        facts["devices"] = [
            [one.type, one.model, one.transport, one.scheduler, _gib(one.size_bytes)]
            for one in storage.leaves()
        ]
        if storage.kind == OBJECT_STORE:
            facts["store"] = [storage.endpoint, storage.path]
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _gib(size_bytes: int | None) -> int | None:
    return None if size_bytes is None else round(size_bytes / GIB)
