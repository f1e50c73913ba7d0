"""Plan: the complete description of a run, checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from iobench.bench.axes import Axes, Variant
from iobench.bench.contenders.base import Contender
from iobench.bench.fio import JOBS
from iobench.bench.judging.repeat import Repeat
from iobench.bench.judging.rules import Rules
from iobench.bench.targets.base import Target
from iobench.environment.machine import fio_version
from iobench.environment.memory import available_bytes
from iobench.errors import OptionError, TargetError, UsageError
from iobench.results.records import WorldFacts
from iobench.units import GIB, MIB, format_size
from iobench.workloads import Workload
from iobench.workloads.specs import FileSpec, size_of

RESERVE = "5% of the free space and 256 MiB stay free"
"""What `DirectoryTarget.free_bytes` leaves out, for messages."""
DEFAULT_SECONDS = 90.0
"""How long a run may take when its size was not chosen."""
LEAST_POOL = 16 * MIB
"""Of each process."""
READER_POOL = 256 * MIB
"""Of a background process: its restores fill the same memory again."""

_PROCESS_BYTES = 256 * MIB  # of a job in a child process: torch and the writers' blocks
_POOL_SHARE = 0.5  # of the available memory, for the data of a run
_UNKNOWN_MEMORY = 2 * GIB  # available where the kernel does not report it
_ALIKE = 0.9  # of the bytes of the largest rank; each rank must write at least this part


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run before its start. `workload` is already scaled; `full_bytes` is its unscaled size."""

    workload: Workload
    full_bytes: int
    rank: int
    contenders: tuple[Contender, ...]
    targets: tuple[Target, ...]
    repeat: Repeat
    ceiling: bool
    seed: int
    aa: bool = False
    """Whether the first variant takes part twice, which measures the noise floor."""
    left_out: tuple[str, ...] = ()
    """The contenders of `all` that do not take part, and why."""
    axes: Axes = field(default_factory=Axes)
    """What is varied besides the contenders."""
    baseline: Variant | None = None
    """Of the variants, the one that the others' rates are given as ratios to.

    Several targets without a baseline are compared with the first of them, contender by contender.
    So are variants with a background process with those without it.
    """
    given: str = ""
    """The name or file by which another process loads the workload."""
    rules: Rules | None = None
    """The rules of a published benchmark that the run keeps."""
    world: WorldFacts | None = None
    """The ranks of a launcher that take part; None for a run of this process and its children."""

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """The variants that the run compares."""
        return tuple(self.axes.variants(self.contenders))

    @property
    def variants_with_twins(self) -> tuple[Variant, ...]:
        """The variants of each repetition; with A/A the first one of each target is there twice."""
        return (*self.variants, *(first_of_each_target(self.variants) if self.aa else ()))

    @property
    def checkpoints(self) -> int:
        """How many checkpoints are saved before the first one is restored."""
        return 1 if self.rules is None else self.rules.times

    @property
    def by_location(self) -> dict[str | None, Target]:
        """The targets by the value that variants have in `target`."""
        return dict(zip(self.axes.targets, self.targets, strict=True))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank whose files each process saves: consecutive ranks, like on one node.

        If the workload has fewer ranks, or if some ranks write much less than others, every process
        saves a copy of the files of `rank`. The ranks of a launcher always save the files of their
        own rank; where the workload has fewer ranks, they begin again with its first one. Replicas
        save the files of the first rank.
        """
        most = self.axes.most_jobs
        if self.axes.replicas:
            return (self.rank,) * most
        if self.world is not None:
            return tuple(rank % self.workload.world_size for rank in range(most))
        own = range(self.rank, self.rank + most)
        if most > 1 and self.rank + most <= self.workload.world_size:
            sizes = [self.workload.size_bytes(rank) for rank in own]
            if min(sizes) >= _ALIKE * max(sizes):
                return tuple(own)
        return (self.rank,) * most

    @property
    def files(self) -> tuple[FileSpec, ...]:
        """The files of one checkpoint of the first process, in the first shape."""
        return self.files_of_jobs[0][0]

    @cached_property
    def files_of_jobs(self) -> tuple[tuple[tuple[FileSpec, ...], ...], ...]:
        """The files of each process, in each shape. There may be 100,000 of each rank."""
        of_ranks = {}
        for rank in dict.fromkeys(self.ranks):
            files = self.workload.files(rank)
            of_ranks[rank] = tuple(shape.apply(files) for shape in self.axes.shapes)
        return tuple(of_ranks[rank] for rank in self.ranks)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of one checkpoint of one process, as far as its layout is known before the run."""
        return size_of(self.files)

    def bytes_of(self, jobs: int) -> int:
        """Bytes of one checkpoint of the first `jobs` processes, as far as they are known."""
        if len(set(self.ranks)) == 1:
            return self.size_bytes * jobs
        return sum(size_of(shapes[0]) for shapes in self.files_of_jobs[:jobs])

    @property
    def all_bytes(self) -> int:
        """Bytes of one checkpoint of all processes, as far as they are known."""
        return self.bytes_of(self.axes.saves)

    @property
    def part(self) -> str | None:
        """Which part of the workload's ranks takes part: `2 of 8 ranks`; None for all or one."""
        if self.world is None or self.world.size >= self.workload.world_size:
            return None
        return f"{self.world.size} of {self.workload.world_size} ranks"

    @property
    def _local_bytes(self) -> int:
        """Bytes of one checkpoint of the processes of one machine, as far as they are known."""
        return self.bytes_of(self._local_jobs)

    @property
    def _local_jobs(self) -> int:
        return self.axes.most_jobs if self.world is None else self.world.local

    @cached_property
    def pool_bytes(self) -> int:
        """Memory that stands in for all tensors, of all processes of one machine together.

        The bytes of one checkpoint, so that no byte repeats, up to half of the memory that is
        available. Peers restore into new memory: its bytes are left free too.
        """
        jobs, available = self._local_jobs, available_bytes() or _UNKNOWN_MEMORY
        largest = max(size_of(shapes[0]) for shapes in self.files_of_jobs)
        most = available * _POOL_SHARE
        if self.beside_peers:
            most = min(most, available - self._local_bytes)
        # With room for the gaps between windows; `Replay.pool_for` takes no more than they need.
        wanted = jobs * (largest + max(LEAST_POOL, largest // 64))
        return max(min(wanted, _rounded(most)), jobs * LEAST_POOL)

    @property
    def beside_peers(self) -> bool:
        """Whether peers take part. If so, every restore allocates its memory inside the clock."""
        return any(one.is_peer for one in self.contenders)

    @property
    def written_bytes(self) -> int:
        """Bytes that the whole run writes, at least, if no fio job is left out.

        Where saves follow each other for a time, these are the bytes that it may write.
        """
        often = self.repeat
        return (often.most or often.times) * self.repetition_bytes + self.earlier_bytes

    @property
    def repetition_bytes(self) -> int:
        """Bytes that one repetition writes, if no fio job is left out."""
        jobs = len(JOBS) * len(self.ceiling_targets)
        storing = [one.saves for one in self.variants_with_twins if one.contender.stores]
        return sum(map(self.bytes_of, storing)) + self.size_bytes * jobs

    @property
    def earlier_bytes(self) -> int:
        """Bytes that a run writes before its first repetition."""
        return self.axes.earlier * self.size_bytes * len(self.targets)

    @property
    def ceiling_targets(self) -> tuple[str | None, ...]:
        """The targets that fio measures: it is requested, installed, and able to use them."""
        if not self.ceiling or fio_version() is None:
            return ()
        return tuple(value for value, target in self.by_location.items() if not target.no_ceiling)

    def check(self) -> None:
        """Raise UsageError or TargetError for a plan that cannot work. Writes nothing."""
        if self.rules is not None and len(self.variants) > 1:
            raise UsageError(
                f"--rules {self.rules.name} measures one writer in one target, not "
                f"{', '.join(one.label for one in self.variants)}; choose one"
            )
        self._check_cuts()
        self._check_memory()
        for value, target in self.by_location.items():
            if any(one.contender.stores for one in self.variants if one.target == value):
                self._check_space(target)

    def _check_cuts(self) -> None:
        """Raise OptionError unless tensor parallelism cuts tensors of the safetensors files."""
        for tp in filter(None, self.axes.restores):
            if not all(map(_is_cut, self.files_of_jobs[0])):
                raise OptionError(
                    f"--restore-as tp={tp}: no safetensors file of {self.workload.name} "
                    "has tensors that tensor parallelism cuts; choose a workload of Hugging Face's "
                    "layout, such as llama7b-export"
                )

    def _check_space(self, target: Target) -> None:
        free, most = target.free_bytes(), self.axes.most_jobs
        stored = self.checkpoints * self.repeat.stored
        earlier = self.axes.earlier * self.size_bytes
        if free is not None and stored * self.all_bytes + earlier > free:
            each = "" if most == 1 else f" of {most} processes"
            each += f", and {format_size(earlier)} to restore in the background," if earlier else ""
            many = f"{stored} times" if stored > 1 else "a checkpoint of"
            raise TargetError(
                f"--target {target.location}: {many} "
                f"{format_size(self.all_bytes)}{each} does not fit, "
                f"{format_size(free)} may be used ({RESERVE}); choose a smaller --size"
            )

    def _check_memory(self) -> None:
        most, available = self._local_jobs, available_bytes()
        size_bytes = self._local_bytes
        needed = min(self.pool_bytes, size_bytes)
        if available is None:
            return
        if self.axes.earlier:
            available -= len(self.targets) * (READER_POOL + _PROCESS_BYTES)
        if self.beside_peers and needed + size_bytes > available:
            raise UsageError(
                f"peers restore the {format_size(size_bytes)} into new memory, and "
                f"{format_size(available)} are available; choose a smaller --size"
            )
        if needed > available:
            raise UsageError(
                f"the data of the run take {format_size(self.pool_bytes)} of memory, and "
                f"{format_size(available)} are available (free memory, and what the limits of "
                "control groups leave); choose a smaller --size, or free some"
            )
        if self.world is None and most > 1 and needed + most * _PROCESS_BYTES > available:
            raise UsageError(
                f"--numjobs {most}: each process takes {format_size(_PROCESS_BYTES)} besides its "
                f"data, and {format_size(available)} are available; choose fewer"
            )

    def listed_files(self) -> Iterator[dict[str, Any]]:
        """Yield path, format and bytes of each file, for the record."""
        for spec in self.files:
            yield {"path": spec.path, "format": spec.format, "bytes": spec.size_bytes}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for the record, without `listed_files`."""
        locations = [target.location for target in self.targets]
        several = len(locations) > 1
        no_ceiling = {one.location: one.no_ceiling for one in self.targets if one.no_ceiling}
        baseline = self.baseline and _described(self.baseline)
        if baseline is None and several:
            baseline = {"target": locations[0], "label": locations[0]}
        elif baseline is None and self.axes.with_and_without:
            baseline = {"background": None, "label": "no background"}
        return {
            "workload": self.workload.name,
            "rank": self.rank,
            "size_bytes": self.size_bytes,
            "full_bytes": self.full_bytes,
            "scale": self.workload.scale.text if self.workload.scale else None,
            "writers": [
                {"name": one.name, "options": dict(one.options)} for one in self.contenders
            ],
            "left_out": list(self.left_out),
            **self.axes.to_dict(),
            "ranks": list(self.ranks),
            "baseline": baseline,
            "target": ",".join(locations),
            **self.repeat.to_dict(),
            "aa": self.aa,
            "pool_bytes": self.pool_bytes,
            "ceiling_jobs": [job.name for job in JOBS] if self.ceiling_targets else [],
            "no_ceiling": (no_ceiling if several else self.targets[0].no_ceiling) or None,
            "crc32": True,
            "seed": self.seed,
            "written_bytes": self.written_bytes,
            **({} if self.rules is None else {"rules": self.rules.name}),
        }


def _rounded(size_bytes: float) -> int:
    """Return up to a quarter less, so that two runs repeat after the same bytes."""
    step = 1 << max(0, int(size_bytes).bit_length() - 3)
    return int(size_bytes) // step * step


def _is_cut(files: Sequence[FileSpec]) -> bool:
    known = (tensor for one in files if one.format == "safetensors" for tensor in one.tensors)
    return any(tensor.split is not None for tensor in known)


def first_of_each_target(variants: Sequence[Variant]) -> list[Variant]:
    """Return the first variant of each target."""
    first: dict[str | None, Variant] = {}
    for one in variants:
        first.setdefault(one.target, one)
    return list(first.values())


def _described(variant: Variant) -> Mapping[str, Any]:
    return {
        "name": variant.contender.name,
        "options": dict(variant.contender.options),
        **variant.setting().axes.of_saves(),
        "label": variant.label,
    }
