"""The fields of records that a copy for publication may have; others may identify the owner."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_type_hints

from iobench.results.codec import KINDS

__all__ = ["unknown_fields"]

# The parts of a record that are free-form, and the records of journals.
_OF_MACHINES = """
architecture available_bytes cached_bytes cgroup container cpu cpu_limit cuda_bindings cufile
dirty_background_bytes dirty_background_ratio dirty_bytes dirty_expire_centisecs dirty_ratio
dirty_writeback_centisecs disabled_sysctl distribution driver features fingerprint gds governor gpus
hostname hugepages_total hypervisor io_uring kernel kernel_version logical_cpus machine
memlock_limit_bytes memory memory_bytes memory_limit_bytes model name numa_nodes nvidia_driver
nvidia_fs nvidia_fs_version open_files_limit overcommit_memory page_cache pci physical_cores product
ready reason remedy state swap_free_bytes swap_total_bytes swappiness total_bytes
transparent_hugepage usable_cpus versions virtual virtualisation works
"""
_OF_STORAGE = """
backing backing_file device discard disk dma_alignment endpoint free_bytes fs_block_bytes fs_type
fua inodes_free inodes_total iostats kind logical_block_bytes loop_direct_io max_hw_sectors_kb
max_sectors_kb mount_options mount_point nr_requests optimal_io_bytes path physical_block_bytes
read_ahead_kb rotational scheduler size_bytes source storage transport type upper used_ratio
write_cache email mac serial user username uuid wwid wwn
"""
_OF_PLANS = """
aa arm arms asked background backgrounds baseline block_size ceiling_jobs crc32 device every
every_asked files format
full_bytes granularities granularity iodepth ioengine job label largest_bytes left_out max_bytes
max_cpu_s_per_gib max_memory_bytes max_s memcpy_bytes_per_s model_params no_ceiling numjobs
objective options own_server persist_s pool_bytes precision probe rank ranks repeat restore_mode
restore_modes restore_subsets rules scale seed serializers simulated_s simulates_whole_step
size_bytes
slices stall_s step_s step_scaled steps target targets verb workload writer writers written_bytes
failure_shape floor floor_record failures_per_1000_node_days gpus_per_node nodes restart_s
huge_pages refill_buffers round_s until
"""
_OF_JOURNALS = """
at command error fingerprint files_sha256 iobench kind measured memory_bytes origin phase restore
round save schema size_bytes spent_s stall_s started_at status storage took_s verify writer
written_bytes
"""
_OPTIONS = """
addressing_style backend block_size buffer checksum concurrency connect_timeout_s crc direct
endpoint_url fallocate files intra_op_parallelism iodepth max_attempts max_pool method part_size
paths queue_depth read_soon read_timeout_s rings shards single_submit small_size
thread_count threads uring verify_tls
"""
_FACTS = frozenset(f"{_OF_MACHINES} {_OF_STORAGE} {_OF_PLANS} {_OF_JOURNALS} {_OPTIONS}".split())
_FREE = {
    "storages": re.compile(r".*"),  # locations, which are replaced
    "versions": re.compile(r"[A-Za-z][\w.-]{0,40}"),  # packages
    "paths": re.compile(r"[a-z_ 0-9]{1,40}"),
    "latencies": re.compile(r"[a-z_ ]{1,40}"),
    "bins": re.compile(r"[0-9]{1,20}"),
    "phases_s": re.compile(r"[a-z_ ]{1,40}"),
    "decisions": re.compile(r"[a-z_ 0-9]{1,30}: [a-z_, 0-9]{1,40}"),
}
"""Objects whose keys are chosen by writers, packages and targets."""
_VERSION = re.compile(r"(?:glibc )?[0-9A-Za-z.+_-]{1,40}")


def unknown_fields(values: Any, key: str = "", where: str = "") -> Iterator[str]:
    """Yield the paths of the fields below `values` that no version of iobench writes."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            path = f"{where}.{name}" if where else name
            free = _FREE.get(key)
            if free.fullmatch(name) if free else name in _known():
                yield from unknown_fields(value, name, path)
            elif not (key == "options" and isinstance(value, bool | int | float | None)):
                yield path
            if key == "versions" and value is not None and not _is_version(value):
                yield path
    elif isinstance(values, list):
        for number, value in enumerate(values):
            yield from unknown_fields(value, key, f"{where}[{number}]")


def _is_version(value: Any) -> bool:
    return isinstance(value, str) and _VERSION.fullmatch(value) is not None


@cache
def _known() -> frozenset[str]:
    found = {"schema", "kind", *_FACTS}
    todo: list[Any] = list(KINDS.values())
    seen = set()
    while todo:
        kind = todo.pop()
        todo += get_args(kind)
        if dataclasses.is_dataclass(kind) and kind not in seen:
            seen.add(kind)
            found |= {field.name for field in dataclasses.fields(kind)}
            todo += get_type_hints(kind).values()
    return frozenset(found)
