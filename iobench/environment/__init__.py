"""Description of the machine and the storage, and probes of what works in a directory.

A leaf package: every other package may use it; it imports only errors, units and linux of iobench.
It never imports torch: versions come from package metadata, GPUs from the driver.

    describe_machine()             host, CPU, memory, GPUs, kernel settings, versions
    describe_storage(directory)    mount, file system, block device and its queue, free space
    DeviceMonitor(directory)       the device's own counters, cheap to read
    probe_directory(directory)     tries O_DIRECT, RWF_DONTCACHE, fallocate, eviction, fsync ...
    advise(machine, storage, ...)  problems and traps, each with a remedy
"""

from __future__ import annotations

from iobench.environment.advice import Advice, advise
from iobench.environment.blockdev import DeviceCounters, DeviceMonitor
from iobench.environment.machine import (
    Machine,
    describe_machine,
    fingerprint,
    fio_version,
    machine_fingerprint,
)
from iobench.environment.probes import Probe, probe_directory
from iobench.environment.storage import Storage, describe_storage

__all__ = [
    "Advice",
    "DeviceCounters",
    "DeviceMonitor",
    "Machine",
    "Probe",
    "Storage",
    "advise",
    "describe_machine",
    "describe_storage",
    "fingerprint",
    "fio_version",
    "machine_fingerprint",
    "probe_directory",
]
