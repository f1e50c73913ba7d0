"""Description of the machine as JSON types and its fingerprint."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from iobench.environment.cpu import describe_cpu, describe_virtualisation
from iobench.environment.gpu import describe_gds, describe_gpus, gpus_of_driver
from iobench.environment.memory import describe_cgroup, describe_memory, describe_page_cache
from iobench.environment.mounts import read_mounts
from iobench.environment.software import describe_software, distribution
from iobench.environment.storage import describe_storage, leaf_devices
from iobench.environment.uring import describe_io_uring
from iobench.linux import kernel_version
from iobench.units import GIB


def describe_machine() -> dict[str, Any]:
    """Describe host, kernel, CPU, memory, GPUs, versions and kernel settings; JSON types only.

    Takes some 50 ms, most of it for running fio and nvidia-smi. Facts that the machine does not
    report are None; they raise no error.
    """
    cpu = describe_cpu()
    gpus = describe_gpus()
    facts: dict[str, Any] = {
        "hostname": platform.node(),
        "distribution": distribution(),
        "kernel": platform.release(),
        "kernel_version": ".".join(map(str, kernel_version())),
        "cpu": cpu,
        "virtualisation": describe_virtualisation(bool(cpu["virtual"])),
        "memory": describe_memory(),
        "cgroup": describe_cgroup(read_mounts()),
        "page_cache": describe_page_cache(),
        "io_uring": describe_io_uring(),
        "gpus": gpus,
        "gds": describe_gds(gpus),
        "versions": describe_software(),
    }
    return facts | {"fingerprint": fingerprint(facts)}


def describe_environment(directory: Path | str) -> dict[str, Any]:
    """Describe the machine, the storage of `directory` and the command, for a result file.

    This fingerprint also covers the storage, unlike that of the machine. Raises TargetError if
    `directory` is not a directory.
    """
    machine, storage = describe_machine(), describe_storage(directory)
    return {
        "machine": machine,
        "storage": storage,
        "command": [str(word) for word in sys.argv],
        "fingerprint": fingerprint(machine, storage),
    }


def machine_fingerprint() -> str:
    """Return `describe_machine()["fingerprint"]`, collecting only the facts that it covers.

    All ranks of a node call it when they start. So it does not run nvidia-smi, which takes seconds
    then, wherever the driver's files have the names.
    """
    return fingerprint(
        {
            "kernel_version": ".".join(map(str, kernel_version())),
            "cpu": describe_cpu(),
            "memory": describe_memory(),
            "cgroup": describe_cgroup(read_mounts()),
            "gpus": gpus_of_driver() or describe_gpus(),
        }
    )


def fingerprint(machine: dict[str, Any], storage: dict[str, Any] | None = None) -> str:
    """Return 12 hexadecimal digits that are equal for machines whose figures are comparable.

    They cover the CPU model, the usable CPUs, the lower of memory and control-group limit in whole
    GiB, the kernel's major.minor and the names of the GPUs. With `storage` they also cover type and
    kind of the file system, and for each device at the bottom of the stack its type, model,
    transport, size in whole GiB and scheduler. For an object store they cover endpoint, bucket and
    prefix. Host name, package versions and free space are not included.
    """
    memory, limit = machine["memory"]["total_bytes"], machine["cgroup"]["memory_limit_bytes"]
    bounds = [value for value in (memory, limit) if value is not None]
    facts: dict[str, Any] = {
        "cpu": machine["cpu"]["model"],
        "cpus": machine["cpu"]["usable_cpus"],
        "memory_gib": _gib(min(bounds, default=None)),
        "kernel": machine["kernel_version"],
        "gpus": sorted(gpu["name"] for gpu in machine["gpus"]),
    }
    if storage is not None:
        facts["storage"] = [storage["kind"], storage["fs_type"]]
        facts["devices"] = [
            [leaf[name] for name in ("type", "model", "transport", "scheduler")]
            + [_gib(leaf["size_bytes"])]
            for leaf in leaf_devices(storage["device"])
        ]
        if "endpoint" in storage:
            facts["store"] = [storage["endpoint"], storage["path"]]
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _gib(size_bytes: int | None) -> int | None:
    return None if size_bytes is None else round(size_bytes / GIB)


def part_of(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the facts under `name`; empty where a record lacks them."""
    part = values.get(name)
    return part if isinstance(part, Mapping) else {}
