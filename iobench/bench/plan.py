"""Plan: what a run will do, how much it moves and how long that takes; checked before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from iobench.bench.contender import Contender
from iobench.bench.fio import JOBS, fio_version
from iobench.bench.repeat import Repeat
from iobench.bench.replay import Replay
from iobench.bench.target import Location, Target
from iobench.environment.memory import describe_memory
from iobench.errors import TargetError, UsageError
from iobench.units import GIB, MIB, format_size
from iobench.workloads import FileSpec, TensorSpec, Workload
from iobench.workloads.reshape import Shape
from iobench.writers.transfer import Transfer

__all__ = ["DEFAULT_SECONDS", "Plan", "Rates", "measure_rates"]

DEFAULT_SECONDS = 120.0
"""How long a run may take whose size nobody chose."""

_PROBE_BYTES, _REMOTE_PROBE_BYTES = 256 * MIB, 32 * MIB
_REST_S = 0.4  # before each sample: settle, removing files, starting fio
_OWN_S_PER_BYTE = 0.8 / GIB  # refilling the pool, digests, verification: what is not timed


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What short probes reached, in bytes per second: each writer's save and restore."""

    save: tuple[float, ...]
    restore: tuple[float, ...]

    def run_s(self, size_bytes: int, *, repeat: int, ceiling: bool) -> float:
        """Seconds that a run of checkpoints of `size_bytes` takes, its rests included."""
        steps = len(self.save) + len(self.restore) + (2 * len(JOBS) if ceiling else 0)
        moving = size_bytes * self.run_s_per_byte(repeat=repeat, ceiling=ceiling)
        return moving + repeat * steps * _REST_S

    def affordable_bytes(self, seconds: float, *, repeat: int, ceiling: bool) -> int:
        """The size for which `run_s` is about `seconds`; rests take at most half of them."""
        moving = max(seconds - self.run_s(0, repeat=repeat, ceiling=ceiling), seconds / 2)
        return int(moving / self.run_s_per_byte(repeat=repeat, ceiling=ceiling))

    def run_s_per_byte(self, *, repeat: int, ceiling: bool) -> float:
        """Seconds that a run takes for each byte of its workload."""
        per_repetition = sum(1 / rate for rate in (*self.save, *self.restore))
        per_repetition += _OWN_S_PER_BYTE * len(self.save)
        if ceiling:
            per_repetition += len(JOBS) * (1 / max(self.save) + 1 / max(self.restore))
        return per_repetition * repeat


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that is ready to go. `workload` is scaled already; `full_bytes` are the unscaled."""

    workload: Workload
    full_bytes: int
    rank: int
    contenders: tuple[Contender, ...]
    target: Target
    repeat: Repeat
    pool_bytes: int
    ceiling: bool
    crc: bool
    seed: int
    aa: bool = False
    """Whether the first contender takes part twice, which measures the noise floor."""
    left_out: tuple[str, ...] = ()
    """Who does not take part though all were asked, and why."""
    shape: Shape = field(default_factory=Shape)
    """The files' serializer and granularity, where they are not the layout's own."""
    subset: float | None = None
    """What part of the bytes restores bring; None for all."""
    baseline: Contender | None = None
    """Of the contenders, the one that the others' rates are given as ratios to."""

    @cached_property
    def files(self) -> tuple[FileSpec, ...]:
        """What one checkpoint consists of."""
        return self.shape.apply(self.workload.files(self.rank))

    @property
    def size_bytes(self) -> int:
        """Bytes of one checkpoint, as far as its layout tells beforehand."""
        return sum(spec.size_bytes for spec in self.files)

    @property
    def beside_peers(self) -> bool:
        """Whether peers take part: every restore then goes to memory allocated inside the clock."""
        return any(one.is_peer for one in self.contenders)

    @property
    def written_bytes(self) -> int:
        """Bytes that the whole run writes, at least."""
        jobs = len(JOBS) if self.measures_ceiling else 0
        storing = sum(one.stores for one in self.taking_part)
        return self.repeat.times * self.size_bytes * (storing + jobs)

    @property
    def taking_part(self) -> tuple[Contender, ...]:
        """The contenders of each repetition, the first of them twice where A/A is asked for."""
        return (*self.contenders, *(self.contenders[:1] if self.aa else ()))

    @property
    def measures_ceiling(self) -> bool:
        """Whether fio is asked for, there, and of use on the target."""
        return self.ceiling and not self.target.no_ceiling and fio_version() is not None

    def check(self) -> None:
        """Raise TargetError or UnavailableError for what cannot work; nothing is written yet."""
        self.target.check()
        self._check_memory()
        for one in self.contenders:
            one.require(self.target.location)
        if any(one.stores for one in self.contenders):
            free = self.target.free_bytes()
            if free is not None and self.size_bytes > free:
                raise TargetError(
                    f"--target {self.target.location}: a checkpoint of "
                    f"{format_size(self.size_bytes)} does not fit, "
                    f"{format_size(free)} may be used; choose a smaller --size"
                )

    def _check_memory(self) -> None:
        needed, available = min(self.pool_bytes, self.size_bytes), available_bytes()
        if available is not None and self.beside_peers and needed + self.size_bytes > available:
            raise UsageError(
                f"peers restore the {format_size(self.size_bytes)} into new memory, and "
                f"{format_size(available)} are available; choose a smaller --size"
            )
        if available is not None and needed > available:
            raise UsageError(
                f"--pool {format_size(self.pool_bytes)} of memory is more than the "
                f"{format_size(available)} that are available; choose a smaller one"
            )

    def to_dict(self) -> dict[str, Any]:
        """The plan as the record and `--dry-run` show it."""
        return {
            "workload": self.workload.name,
            "rank": self.rank,
            "size_bytes": self.size_bytes,
            "full_bytes": self.full_bytes,
            "scale": self.workload.scale.text if self.workload.scale else None,
            "files": [
                {"path": spec.path, "format": spec.format, "bytes": spec.size_bytes}
                for spec in self.files
            ],
            "writers": [
                {"name": one.name, "options": dict(one.options)} for one in self.contenders
            ],
            "left_out": list(self.left_out),
            "serializer": self.shape.serializer,
            "restore_subset": self.subset,
            "granularity": self.shape.granularity and str(self.shape.granularity),
            "baseline": self.baseline
            and {"name": self.baseline.name, "options": dict(self.baseline.options)},
            "target": self.target.location,
            "repeat": self.repeat.times,
            "precision": self.repeat.precision,
            "max_s": self.repeat.max_s,
            "aa": self.aa,
            "pool_bytes": self.pool_bytes,
            "ceiling_jobs": [job.name for job in JOBS] if self.measures_ceiling else [],
            "no_ceiling": self.target.no_ceiling or None,
            "crc32": self.crc,
            "seed": self.seed,
            "written_bytes": self.written_bytes,
        }


def available_bytes() -> int | None:
    """Bytes of memory that may be taken without swapping; None when the kernel does not say."""
    found: int | None = describe_memory()["available_bytes"]
    return found


def measure_rates(contenders: Sequence[Contender], target: Target) -> Rates:
    """Save and restore a short random file with each contender. For planning only."""
    save, restore = [], []
    free = target.free_bytes()
    size = _REMOTE_PROBE_BYTES if free is None else min(_PROBE_BYTES, free)
    size = size or _PROBE_BYTES  # none free: nothing stores
    with target.scratch() as scratch:
        for one in contenders:
            replay, where = _short_replay(size), scratch.locate("probe")
            replay.prepare()
            save.append(_rate(one.save, replay, where))
            restore.append(_rate(one.restore, replay, where))
            scratch.remove("probe")
    return Rates(save=tuple(save), restore=tuple(restore))


def _short_replay(size_bytes: int) -> Replay:
    blob = TensorSpec(name="blob", dtype="uint8", shape=(size_bytes,))
    file = FileSpec(path="file", format="raw", tensors=(blob,), size_bytes=size_bytes, exact=True)
    replay = Replay([file], pool_bytes=size_bytes, seed=0, crc=True)
    assert replay.file_bytes == (size_bytes,)
    return replay


def _rate(
    operation: Callable[[Replay, Location], list[Transfer]], replay: Replay, where: Location
) -> float:
    """Bytes per second of one save or restore."""
    began = time.perf_counter()
    operation(replay, where)
    return replay.size_bytes() / (time.perf_counter() - began)
