"""Plan: what a run will do, how much it moves and how long that takes; checked before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from iobench.bench.fio import JOBS, fio_version
from iobench.bench.target import Target
from iobench.environment.memory import describe_memory
from iobench.errors import TargetError, UsageError
from iobench.units import GIB, MIB, format_size
from iobench.workloads import Workload
from iobench.writers.base import Writer
from iobench.writers.image import FileImage

__all__ = ["DEFAULT_SECONDS", "Plan", "Rates", "measure_rates"]

DEFAULT_SECONDS = 120.0
"""How long a run may take whose size nobody chose."""

_PROBE_BYTES, _REMOTE_PROBE_BYTES = 256 * MIB, 32 * MIB
_OWN_S_PER_BYTE = 0.8 / GIB  # refilling the pool, digests, verification: what is not timed


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What short probes reached, in bytes per second: each writer's save and restore."""

    save: tuple[float, ...]
    restore: tuple[float, ...]

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
    writers: tuple[Writer, ...]
    target: Target
    repeat: int
    pool_bytes: int
    ceiling: bool
    crc: bool
    seed: int

    @property
    def size_bytes(self) -> int:
        """Bytes of one checkpoint, as far as its layout tells beforehand."""
        return self.workload.size_bytes(self.rank)

    @property
    def written_bytes(self) -> int:
        """Bytes that the whole run writes."""
        jobs = len(JOBS) if self.measures_ceiling else 0
        storing = sum(writer.stores for writer in self.writers)
        return self.repeat * self.size_bytes * (storing + jobs)

    @property
    def measures_ceiling(self) -> bool:
        """Whether fio is asked for, there, and of use on the target."""
        return self.ceiling and not self.target.no_ceiling and fio_version() is not None

    def check(self) -> None:
        """Raise TargetError or UnavailableError for what cannot work; nothing is written yet."""
        self.target.check()
        self._check_memory()
        for writer in self.writers:
            writer.require(self.target.location)
        if any(writer.stores for writer in self.writers):
            free = self.target.free_bytes()
            if free is not None and self.size_bytes > free:
                raise TargetError(
                    f"--target {self.target.location}: a checkpoint of "
                    f"{format_size(self.size_bytes)} does not fit, "
                    f"{format_size(free)} may be used; choose a smaller --size"
                )

    def _check_memory(self) -> None:
        needed, available = min(self.pool_bytes, self.size_bytes), available_bytes()
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
                for spec in self.workload.files(self.rank)
            ],
            "writers": [
                {"name": writer.name, "options": writer.options.to_dict()}
                for writer in self.writers
            ],
            "target": self.target.location,
            "repeat": self.repeat,
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


def measure_rates(writers: Sequence[Writer], target: Target) -> Rates:
    """Save and restore a short random file with each writer that stores. For planning only."""
    random = np.random.default_rng()
    save, restore = [], []
    free = target.free_bytes()
    size = _REMOTE_PROBE_BYTES if free is None else min(_PROBE_BYTES, free)
    with target.scratch() as scratch:
        for writer in writers:
            memory = random.integers(0, 256, size, np.uint8)
            image = FileImage.of("file", [memory])
            where = scratch.locate("probe")
            save.append(writer.write(image, where).rate_bytes_per_s)
            restore.append(writer.read(image, where).rate_bytes_per_s)
            scratch.remove("probe")
    return Rates(save=tuple(save), restore=tuple(restore))
