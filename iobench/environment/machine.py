"""Description of the machine and its fingerprint: CPU, memory, GPUs, io_uring, software.

The versions are read without importing the packages. Some imports are inside functions: writers
import this package, and `iobench --help` must be fast.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import iobench
from iobench.environment.facts import Fact, joined, size_of
from iobench.environment.gpu import Gds, Gpu, describe_gds, describe_gpus
from iobench.environment.kernelfs import read_int, read_text
from iobench.environment.memory import (
    ControlGroup,
    MachineMemory,
    PageCache,
    describe_cgroup,
    describe_memory,
    describe_page_cache,
)
from iobench.environment.storage import OBJECT_STORE, Storage
from iobench.linux import kernel_version
from iobench.units import GIB, format_rate

PACKAGES = (
    *("torch", "numpy", "safetensors", "pandas", "xxhash", "pyuring", "boto3"),
    *("awscrt", "lightning", "transformers", "accelerate", "deepspeed", "runai-model-streamer"),
    "torch-checkpointing",
)
_SYS_IO_URING_SETUP = 425  # the same number on every architecture except alpha
_ENTRIES = 4
_PARAMS_BYTES = 120  # sizeof(struct io_uring_params), linux/io_uring.h
_FEATURES_OFFSET = 20
_SYSCTL = Path("/proc/sys/kernel/io_uring_disabled")


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


@dataclass(frozen=True, kw_only=True)
class IoUring:
    """Whether a ring `works`, the kernel's `features` bits, the sysctl, and why it does not."""

    works: bool = False
    disabled_sysctl: int | None = None
    features: int | None = None
    reason: str = ""
    remedy: str = ""


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


@functools.cache
def package_version(name: str) -> str | None:
    """Return the installed version of a Python package; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def fio_version() -> str | None:
    """Return the version of fio on PATH, such as `3.33`; None if it is missing or fails."""
    import shutil
    import subprocess

    program = shutil.which("fio")
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip().removeprefix("fio-") or None


def torch_cuda_version() -> str | None:
    """Return the CUDA version that the installed torch was built with, from its version file."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = read_text(Path(spec.origin).with_name("version.py")) or ""
    found = re.search(r"^cuda[^=\n]*=\s*'([^']+)'", text, re.MULTILINE)
    return found[1] if found else None


def distribution() -> str | None:
    """Return `Debian GNU/Linux 12 (bookworm)` or the like; None if unknown."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return None


def describe_software() -> dict[str, str | None]:
    """Return the versions of Python, iobench, fio and the packages a result can depend on."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "iobench": iobench.__version__,
        "fio": fio_version(),
        "torch_cuda": torch_cuda_version(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
    }
    return versions | {name: package_version(name) for name in PACKAGES}


def explain_refusal(number: int, disabled: int | None) -> tuple[str, str]:
    """Return the reason and the remedy, from the errno and the sysctl io_uring_disabled.

    The sysctl (since Linux 6.6): 0 permits all processes, 1 only those with CAP_SYS_ADMIN or in
    io_uring_group, 2 no process.
    """
    if number == errno.ENOSYS:
        return (
            "the kernel has no io_uring (older than 5.1, built without it, or a sandbox)",
            "Use a kernel >= 5.10, or leave the sandbox; odirect and libaio work without it.",
        )
    if number == errno.EPERM and disabled:
        return (
            f"disabled by kernel.io_uring_disabled={disabled}",
            "As root: sysctl kernel.io_uring_disabled=0",
        )
    if number in (errno.EPERM, errno.EACCES):
        return (
            f"refused with {errno.errorcode[number]}, by a seccomp filter or security module",
            "Containers: allow io_uring in the seccomp profile "
            "(docker run --security-opt seccomp=FILE).",
        )
    if number == errno.ENOMEM:
        return ("not enough lockable memory for a ring", "Raise the limit: ulimit -l unlimited")
    return (f"{errno.errorcode.get(number, number)}: {os.strerror(number)}", "")


def describe_io_uring() -> IoUring:
    """Try to set up a ring."""
    disabled = read_int(_SYSCTL)
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(_PARAMS_BYTES)
    ring = libc.syscall(
        ctypes.c_long(_SYS_IO_URING_SETUP), ctypes.c_uint(_ENTRIES), ctypes.byref(params)
    )
    if ring < 0:
        reason, remedy = explain_refusal(ctypes.get_errno(), disabled)
        features = None
    else:
        os.close(ring)
        reason, remedy = "", ""
        features = int.from_bytes(params.raw[_FEATURES_OFFSET : _FEATURES_OFFSET + 4], "little")
    return IoUring(
        works=ring >= 0,
        disabled_sysctl=disabled,
        features=features,
        reason=reason,
        remedy=remedy,
    )
