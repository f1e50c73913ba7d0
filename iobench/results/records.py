"""The records of a result file: Run (first line), Sample, CeilingSample, Failure, TrainBlock, End.

Field names are the keys in the file; the fields of a `setting` are keys of the record itself. A
new field of schema 1 needs a default, so that old files still load. Any other change makes schema
2. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Literal, TypeAlias

from iobench.environment.machine import Machine
from iobench.environment.storage import Storage
from iobench.results.setting import IF_SET, AxisValues, HasSetting, Setting
from iobench.units import format_size_exact
from iobench.writers.transfer import Fallback, Latency, PathCount

Operation: TypeAlias = Literal["save", "restore"]
"""What a sample measured."""
EndStatus: TypeAlias = Literal["complete", "interrupted", "failed"]
"""How the process that wrote a file ended."""


@dataclass(frozen=True, kw_only=True)
class Cold:
    """Part of the files that was still in the page cache when the clock of a restore started.

    `method`: `cachestat` or `mincore`, joined by `+` if both were used; `remote` for storage that
    is not read through the page cache.
    """

    resident_bytes: int
    resident_fraction: float
    method: str
    dropped_caches: bool


@dataclass(frozen=True, kw_only=True)
class DeviceCounts:
    """Increase of the counters while the clock ran; None for a counter that does not exist.

    `read_bytes`, `write_bytes`: the block device's (/sys/block/*/stat), I/O of all processes.
    `process_*`: `read_bytes` and `write_bytes` of /proc/self/io.
    """

    read_bytes: int | None
    write_bytes: int | None
    process_read_bytes: int | None
    process_write_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Interference:
    """Interference of other processes while the clock ran; None for an unknown value.

    `steal_s`: CPU seconds that the hypervisor gave to others, summed over all CPUs (/proc/stat).
    `memory_stall_s`: time in which some task waited for memory (/proc/pressure/memory).
    `foreign_*_bytes`: the block device's count minus that of this process; small values are the
    file system's journal and metadata.
    """

    steal_s: float | None
    memory_stall_s: float | None
    foreign_read_bytes: int | None
    foreign_write_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Series:
    """Bytes in each `interval_s` from the start of the clock to its end; the last one is shorter.

    `completed`: bytes of completed operations by the writer's own count, padding included. Bytes
    written through the page cache are not on storage yet. None for writers without such a count.
    `counted`: bytes written (save) or read (restore) by `counter`: `device` is the block device
    with the I/O of all processes, `process` the calls of this process if there is no device.
    """

    interval_s: float
    completed: tuple[int, ...] | None
    counter: Literal["device", "process"] | None
    counted: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What the files of a checkpoint looked like right after an operation, outside its clock.

    `problems`, in words: files that are missing, not regular (links count), of another size than
    was reported, with holes, on another file system or changed after the save, and mount points.
    `unsynced_bytes`: in the page cache, dirty or under write-back; None where the kernel cannot
    say, and `unseen` is the reason then. `flushed`: whether the device flushed
    its cache before the writer of a save returned; None where the kernel does not count that.
    `ignored_syncs`: why a sync makes nothing durable here; empty where it does.
    """

    problems: tuple[str, ...]
    unsynced_bytes: int | None
    unseen: str = ""
    flushed: bool | None = None
    ignored_syncs: str = ""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Memory that an operation took; None for a part that the kernel does not show.

    `process_bytes`: the most memory of the processes themselves, with what the writer keeps for
    its next operation, without the tensors. `page_cache_bytes`: pages of the checkpoint's files in
    the page cache right after the clock; 0 where no files are stored, None on a file system in
    memory and over several machines.
    """

    process_bytes: int | None
    page_cache_bytes: int | None

    @property
    def total_bytes(self) -> int | None:
        """The sum; None if a part is unknown: that of a buffered save is nearly all page cache."""
        if self.process_bytes is None or self.page_cache_bytes is None:
            return None
        return self.process_bytes + self.page_cache_bytes


@dataclass(frozen=True, kw_only=True)
class BackgroundRestores:
    """The restores that another process made, one after the other, while the clock ran.

    `writer` read them. `bytes` moved while the clock ran: a restore that it cut counts by the part
    of its time. `lead_s` is how long before the clock the first one began, and `lag_s` how long
    after it the last one ended; below zero, the clock ran without one. `reading_s` is the time of
    the clock in restores; between two of them the files leave the page cache. `resident_fraction`
    is the largest part of the files that stayed there. `from_storage` is the part of all their
    bytes that the kernel counted as read from storage by this process; None without such a counter.
    `mismatches` are the tensors of the last one that differ from what was saved. `error` is why it
    ended early; empty if it did not.
    """

    writer: str
    restores: int
    bytes: int
    lead_s: float
    lag_s: float
    reading_s: float
    resident_fraction: float
    from_storage: float | None
    mismatches: int
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Tensors and bytes that were compared with the saved ones, and the number of differences."""

    tensors: int
    bytes: int
    mismatches: int


@dataclass(frozen=True, kw_only=True)
class WorldFacts:
    """The ranks that a launcher started, by rank where a field has several values.

    `interface` is the network interface of rank 0. `restored_from` is the rank whose files each
    rank restores. `clock_offset_s` was added to the monotonic clock of each rank to get that of
    rank 0, and is at most `clock_error_s` wrong.
    """

    launcher: str
    size: int
    nodes: int
    hosts: tuple[str, ...]
    node: tuple[int, ...]
    interface: str | None
    restored_from: tuple[int, ...]
    clock_offset_s: tuple[float, ...]
    clock_error_s: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("hosts", "node", "restored_from", "clock_offset_s", "clock_error_s"):
            found: Sequence[object] = getattr(self, name)
            if len(found) != self.size:
                raise ValueError(f"{name} must have {self.size} values, and has {len(found)}")

    @property
    def local(self) -> int:
        """The most ranks on one node."""
        return max(map(self.node.count, self.node), default=0)

    def named(self, rank: int) -> str:
        """Return `rank 5 (host b)`."""
        return f"rank {rank} (host {self.hosts[rank]})"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Facts of the machine, and of the storage under the target.

    A run of several targets has `storages`, by location, and an empty `storage`.
    """

    machine: Machine
    storage: Storage
    storages: Mapping[str, Storage] = field(default_factory=dict, metadata=IF_SET)

    def storage_of(self, target: str | None) -> Storage:
        """Return the storage under a target, which is None in a run of one."""
        return self.storage if target is None else self.storages.get(target, Storage())


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """The replayed workload: `bytes` of the `full_bytes` that `rank` writes at full size.

    `scale` describes the reduction in words; None for full size. `restored_bytes`: bytes of a
    partial restore; None if a restore loads everything. `fingerprint` identifies listed files by
    their formats, dtypes and sizes; "" and not written for a model and a layout.
    """

    name: str
    rank: int
    bytes: int
    full_bytes: int
    files: int
    scaled: bool
    scale: str | None = None
    restored_bytes: int | None = None
    fingerprint: str = field(default="", metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class VariantFacts:
    """Size of the samples with these axes: `bytes` in `files` files, summed over all processes.

    `axes` are those of the samples; saves have no `restore_as`.
    """

    operation: Operation
    axes: AxisValues
    bytes: int
    files: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """The header of a run: request, machine and workload. `plan` is free-form.

    `variants` has the sizes of samples if they differ; otherwise it is empty. `world` has the ranks
    of a launcher; None for a run in one process or of local processes.
    """

    kind: ClassVar[str] = "run"

    run_id: str
    started_at: str
    command: tuple[str, ...]
    config_hash: str
    environment: Environment
    workload: WorkloadFacts
    variants: tuple[VariantFacts, ...] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    world: WorldFacts | None = field(default=None, metadata=IF_SET)

    def __post_init__(self) -> None:
        check_time("started_at", self.started_at)


@dataclass(frozen=True, kw_only=True)
class Sample(HasSetting):
    """One timed save or restore of the whole workload by one writer.

    `order` is the position within the repetition. `bytes`, `cpu_s`, `paths` and counts are sums
    over all `numjobs` processes. `elapsed_s` ends when the last byte is durable (save) or in memory
    (restore); `last_done_s` is the same. `first_done_s` ends when the first process has its own
    files durable, or in memory; for one process it equals `last_done_s`. `jobs_done_s` has that
    time of each of several processes, in their order, and `jobs_bytes` the bytes that each of them
    moved; both are empty in older records. `late_s` is how long after the common release
    the last rank began, and `clock_error_s` by how much the ranks' times may be wrong. `cpu_s` is
    of these processes, `system_cpu_s` of all their machines. `decisions` counts operations by path
    and reason for writers that choose. `stored` is None for an object store, and in records from
    before the field. `latencies` has the durations of all operations by their kind; it is empty in
    older records and for peers. `background_restores` has those of another process meanwhile, if it
    was asked for. `durable` is what the writer said of its save. `stores` is False for a writer
    that stores nothing and only measures the harness. `memory` is None in older records.
    """

    kind: ClassVar[str] = "sample"

    run_id: str
    repetition: int
    order: int
    setting: Setting
    operation: Operation
    bytes: int
    elapsed_s: float
    first_done_s: float
    last_done_s: float
    jobs_done_s: tuple[float, ...] = field(default=(), metadata=IF_SET)
    jobs_bytes: tuple[int, ...] = field(default=(), metadata=IF_SET)
    late_s: float = field(default=0.0, metadata=IF_SET)
    clock_error_s: float = field(default=0.0, metadata=IF_SET)
    phases_s: Mapping[str, float]
    paths: Mapping[str, PathCount]
    retries: int = 0
    fallbacks: tuple[Fallback, ...] = ()
    decisions: Mapping[str, int] = field(default_factory=dict)
    latencies: Mapping[str, Latency] = field(default_factory=dict, metadata=IF_SET)
    cpu_s: float
    system_cpu_s: float | None
    memory: MemoryUse | None = field(default=None, metadata=IF_SET)
    cold: Cold | None = None
    device: DeviceCounts | None = None
    verified: Verified | None = None
    stored: Stored | None = None
    durable: bool = True
    stores: bool = True
    interference: Interference | None = None
    background_restores: BackgroundRestores | None = field(default=None, metadata=IF_SET)
    series: Series | None = None
    notes: tuple[str, ...] = ()
    started_at: str

    def __post_init__(self) -> None:
        _check_moved(self.bytes, self.elapsed_s)
        check_time("started_at", self.started_at)

    @property
    def stored_bytes(self) -> int:
        """The bytes that storage moves at least.

        Processes that restore the same files may receive them from each other, and through the page
        cache of their machine: then storage moves them once.
        """
        axes = self.axes
        same = axes.restore_mode is not None or axes.slices is not None
        return self.bytes // (axes.numjobs if same and self.operation == "restore" else 1)


@dataclass(frozen=True, kw_only=True)
class CeilingSample:
    """One fio job, timed like a sample. `job` has its parameters, `error` why it failed.

    `target` is the location in runs of several targets, and None in runs of one.
    """

    kind: ClassVar[str] = "ceiling"

    run_id: str
    repetition: int
    order: int
    target: str | None = field(default=None, metadata=IF_SET)
    job: Mapping[str, Any]
    operation: Operation
    bytes: int
    elapsed_s: float
    cpu_s: float | None
    error: str | None = None

    def __post_init__(self) -> None:
        if self.error is None:
            _check_moved(self.bytes, self.elapsed_s)


@dataclass(frozen=True, kw_only=True)
class Failure(HasSetting):
    """A save or restore that raised `error`. Its writer takes no further part in the run."""

    kind: ClassVar[str] = "failure"

    run_id: str
    repetition: int
    order: int
    setting: Setting
    operation: Operation
    error: str
    started_at: str

    def __post_init__(self) -> None:
        check_time("started_at", self.started_at)

    @property
    def why(self) -> str:
        """Why its contender is not ranked: `its save failed in repetition 3 (OSError: ...)`."""
        return f"its {self.operation} failed in repetition {self.repetition + 1} ({self.error})"


@dataclass(frozen=True, kw_only=True)
class TrainSave:
    """One checkpoint of a training block, saved after `step`.

    `stall_s`: time for which training was stopped. `persist_s`: time of the write in the
    background; None if the checkpoint was not written, or if the call itself wrote it. `durable_s`:
    time from the call until it was durable; None if that is unknown. `status` is that
    of iobench.checkpoint.save.
    """

    step: int
    status: str
    stall_s: float
    persist_s: float | None
    durable_s: float | None = None


def how_saved(mode: str, slots: int | None, budget_bytes: int | None) -> str:
    """Return how training saves: `sync`, `async=2` or `lazy=2 budget=1GiB`."""
    budget = "" if budget_bytes is None else f" budget={format_size_exact(budget_bytes)}"
    return f"{mode}={slots}{budget}" if slots else f"{mode}{budget}"


@dataclass(frozen=True, kw_only=True)
class TrainBlock:
    """A block of training steps with checkpoints by one writer in one mode (`none`: without any).

    `wall_s` is the time from the first step until the last checkpoint is durable. Per step there
    are `step_s` without stalls, and whether a checkpoint was being written (`persisting`). Memory
    of the process and dirty pages of the machine are peaks of ten readings per second; None if
    unreadable. `losses_equal`: all losses equal those without checkpoints, bit for bit.
    `resumed_equal`: so do the losses and the final state after a resume from the last checkpoint;
    None if not tried.
    """

    kind: ClassVar[str] = "train"

    run_id: str
    repetition: int
    order: int
    writer: str
    options: Mapping[str, Any]
    mode: Literal["none", "sync", "async", "lazy", "memory", "spill"]
    slots: int | None
    bytes: int
    wall_s: float
    step_s: tuple[float, ...]
    persisting: tuple[bool, ...]
    saves: tuple[TrainSave, ...]
    peak_memory_bytes: int | None
    peak_dirty_bytes: int | None
    losses_equal: bool
    resumed_equal: bool | None = None
    budget_bytes: int | None = None
    started_at: str

    @property
    def how(self) -> str:
        """The mode with its slots and budget, see `how_saved`."""
        return how_saved(self.mode, self.slots, self.budget_bytes)

    @property
    def setting(self) -> Setting:
        """The writer and its options; training has no axes."""
        return Setting(writer=self.writer, options=self.options)

    @property
    def stall_s(self) -> float | None:
        """The median stall of the saves that were not skipped; None without any.

        Statistics count a block once: its saves share the state of the machine.
        """
        stalls = [save.stall_s for save in self.saves if save.status != "skipped"]
        return statistics.median(stalls) if stalls else None

    def __post_init__(self) -> None:
        _check_moved(self.bytes, self.wall_s)
        check_time("started_at", self.started_at)
        if len(self.step_s) != len(self.persisting):
            raise ValueError("step_s and persisting must be of equal length")


@dataclass(frozen=True, kw_only=True)
class End:
    """The last record: how the run ended. `samples` is the number of Sample records before it."""

    kind: ClassVar[str] = "end"

    run_id: str
    finished_at: str
    status: EndStatus
    samples: int
    error: str | None = None

    def __post_init__(self) -> None:
        check_time("finished_at", self.finished_at)


def _check_moved(size_bytes: int, elapsed_s: float) -> None:
    if size_bytes <= 0 or elapsed_s <= 0 or math.isinf(size_bytes / elapsed_s):
        raise ValueError(
            f"bytes and elapsed_s must be above zero, and are {size_bytes} and {elapsed_s}"
        )


def check_time(name: str, text: str) -> None:
    """Raise ValueError unless `text` is a time with its zone."""
    try:
        aware = datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        aware = False
    if not aware:
        raise ValueError(f"{name} must be ISO 8601 with a time zone, and is {text!r}")
