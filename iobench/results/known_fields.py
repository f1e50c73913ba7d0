"""The fields of records that a copy for publication may have; others may identify the owner."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, get_args, get_type_hints

from iobench.results.codec import KINDS

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
aa arm arms asked backgrounds baseline block_size ceiling_jobs crc32 cuda_bindings every
every_asked failure_shape failures_per_1000_node_days floor floor_record gpus_per_node
granularities huge_pages iodepth ioengine label largest_bytes left_out max_bytes max_cpu_s_per_gib
max_memory_bytes max_s measured memcpy_bytes_per_s model_params no_ceiling objective origin
own_server phase pool_bytes precision probe ranks refill_buffers repeat restart_s restore
restore_modes restore_subsets round round_s rules save seed serializers simulated_s
simulates_whole_step spent_s step_scaled steps targets took_s until verb verify writers
written_bytes
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
