"""The fields of records that a copy for publication may have; others may identify the owner."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, get_args, get_type_hints

from iobench.results.codec import KINDS

__all__ = ["FACTS", "FREE", "HOSTS", "PLACES", "known"]

_FACTS = """
schema kind run_id config_hash fingerprint files_sha256 started_at finished_at at iobench
architecture container distribution driver fs_type governor hypervisor kernel kernel_version model
nvidia_driver nvidia_fs_version product scheduler transparent_hugepage transport write_cache
gpus.name gpus.pci device.name device.disk device.device device.type backing.name backing.disk
backing.device backing.type files.path files.format
"""
FACTS = frozenset(_FACTS.split())
"""Fields, or PARENT.FIELD, whose texts are of hardware, software or iobench: they stay whole."""
HOSTS = {"hostname", "hosts"}
PLACES = {"backing_file", "cufile", "endpoint", "mount_point", "path", "source", "target"}
FREE = {"storages": "storage", "versions": "version"} | dict.fromkeys(
    ("bins", "decisions", "latencies", "options", "paths", "phases_s"), ""
)
"""Objects whose keys writers, packages and targets choose, and the field that each value is."""
_OTHERS = """
aa arm arms asked available_bytes background backgrounds backing baseline block_size cached_bytes
ceiling_jobs cgroup command cpu cpu_limit crc32 cuda_bindings device dirty_background_bytes
dirty_background_ratio dirty_bytes dirty_expire_centisecs dirty_ratio dirty_writeback_centisecs
disabled_sysctl discard disk dma_alignment error every every_asked failure_shape
failures_per_1000_node_days features files floor floor_record format free_bytes fs_block_bytes fua
full_bytes gds gpus gpus_per_node granularities granularity huge_pages hugepages_total inodes_free
inodes_total io_uring iodepth ioengine iostats job label largest_bytes left_out
logical_block_bytes logical_cpus loop_direct_io machine max_bytes max_cpu_s_per_gib
max_hw_sectors_kb max_memory_bytes max_s max_sectors_kb measured memcpy_bytes_per_s
memlock_limit_bytes memory memory_bytes memory_limit_bytes model_params mount_options name
no_ceiling nodes nr_requests numa_nodes numjobs nvidia_fs objective open_files_limit
optimal_io_bytes options origin overcommit_memory own_server page_cache pci persist_s phase
physical_block_bytes physical_cores pool_bytes precision probe rank ranks read_ahead_kb ready
reason refill_buffers remedy repeat restart_s restore restore_mode restore_modes restore_subsets
rotational round round_s rules save scale seed serializers simulated_s simulates_whole_step
size_bytes slices spent_s stall_s state status step_s step_scaled steps storage storages
swap_free_bytes swap_total_bytes swappiness targets took_s total_bytes type until upper usable_cpus
used_ratio verb verify versions virtual virtualisation works workload writer writers written_bytes
"""
"""The free-form parts of records, and the records of journals."""


@cache
def known() -> frozenset[str]:
    """Return the names of all fields that iobench writes."""
    found = {*_OTHERS.split(), *HOSTS, *PLACES, *(one.rpartition(".")[2] for one in FACTS)}
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
