"""Floor: the smallest difference that counts as one, and the A/A record that shows it.

A floor holds for the machine and the storage that it was measured on. So a record without an A/A of
its own takes that of the newest A/A record beside it that is of the same machine, storage, number
of processes and about the same size; and `LEAST_FLOOR` where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from iobench.bench.judging.verdict import Verdict, VerdictStatus, judged
from iobench.environment import Machine, Storage
from iobench.errors import ResultFileError
from iobench.results import Operation, ResultFile, Run, Sample, read
from iobench.results.result_file import read_run
from iobench.results.scrub import HOST_REPLACED
from iobench.stats.comparison import LEAST_FLOOR, noise_floor
from iobench.text import printable

OperationKind = tuple[Operation, str | None, str | None]
"""An operation, what it restores (`restore_as`), and what goes on beside it (`background`)."""
RecordedFloor = Callable[[OperationKind, str | None], "Floor"]
"""Returns the floor of a kind in a target, None in a run of one, by the records of other runs."""

_SIZES = 2  # times as large or as small: a longer save averages over more of the noise


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Differences up to `part` of a rate are noise: 0.03 is 3%.

    `own`: by an A/A of the run itself. `record` is the file of another run whose A/A shows it. A
    floor with neither is a convention, LEAST_FLOOR.
    """

    part: float = LEAST_FLOOR
    own: bool = False
    record: str | None = None

    def __str__(self) -> str:
        """`2%`, or `16.7% (A/A in results/aa.jsonl)`."""
        return f"{100 * self.part:.3g}%" + (f" (A/A in {self.record})" if self.record else "")

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Floor | None:
        """Return the floor by the A/A among a run's samples of one operation; None without one."""
        part = noise_floor(samples)
        return None if part is None else cls(part=max(part, LEAST_FLOOR), own=True)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a noise floor holds for: a machine, storage and processes, and files of `size_bytes`."""

    facts: tuple[Any, ...]
    size_bytes: int

    @classmethod
    def of(
        cls,
        machine: Machine,
        storage: Storage,
        size_bytes: int,
        *,
        hosts: Sequence[str] = (),
        numjobs: Sequence[int] = (1,),
    ) -> Conditions | None:
        """Return the conditions of a measurement; None where its record does not name them.

        `hosts` are those of the ranks of a launcher, and `numjobs` the numbers of local processes.
        """
        host, kind = machine.hostname, machine.fingerprint
        where = (storage.fs_type, storage.source, storage.mount_point, storage.endpoint)
        if host is None or HOST_REPLACED.fullmatch(host) or kind is None or not any(where):
            return None
        bucket = storage.path if storage.endpoint else None
        devices = tuple((one.name, one.type, one.model, one.size_bytes) for one in storage.leaves())
        facts = (host, kind, where, bucket, devices, tuple(hosts), tuple(numjobs))
        return cls(facts=facts, size_bytes=size_bytes)

    def is_like(self, other: Conditions) -> bool:
        """Whether a floor that was measured in one holds in the other."""
        small, large = sorted((self.size_bytes, other.size_bytes))
        return self.facts == other.facts and large <= _SIZES * small


def conditions_of(run: Run) -> dict[str | None, Conditions]:
    """Return the conditions of a run by target, None for the only one, where they are known."""
    environment, numjobs = run.environment, run.plan.get("numjobs")
    found = {
        target: Conditions.of(
            environment.machine,
            environment.storage_of(target),
            run.workload.bytes,
            hosts=run.world.hosts if run.world else (),
            numjobs=numjobs if isinstance(numjobs, list | tuple) else (1,),  # older records
        )
        for target in (*environment.storages, *(() if environment.storages else (None,)))
    }
    return {target: one for target, one in found.items() if one is not None}


def kind_of(sample: Sample) -> OperationKind:
    """Return what the sample is a measurement of, whatever its writer and target."""
    return sample.operation, sample.axes.restore_as, sample.axes.background


def floors_beside(result: ResultFile) -> RecordedFloor:
    """Return the floors by the other records in the directory of `result`."""
    near, there = NearFloors(result.path.parent, result.run.run_id), conditions_of(result.run)
    return lambda kind, target: near.of(there.get(target), kind)


class NearFloors:
    """The floors that the A/A records of a directory show. Reads them when one is asked for."""

    def __init__(self, directory: Path, run_id: str = "") -> None:
        """`run_id` is a run that does not count: the one whose floor is asked for."""
        self._directory, self._run_id = directory, run_id
        self._read: dict[Path, list[tuple[Sample, Verdict]]] = {}

    def of(self, wanted: Conditions | None, kind: OperationKind) -> Floor:
        """Return the floor by the newest A/A record in the same conditions; else LEAST_FLOOR."""
        for path, run in self._runs if wanted is not None else ():
            for target, there in conditions_of(run).items():
                if wanted is not None and wanted.is_like(there):
                    floor = self._measured(path, kind, target)
                    if floor is not None:
                        return replace(floor, own=False, record=printable(str(path)))
        return Floor()

    @cached_property
    def _runs(self) -> list[tuple[Path, Run]]:
        headers = ((path, read_run(path)) for path in sorted(self._directory.glob("*.jsonl")))
        aa = [
            (path, run)
            for path, run in headers
            if run is not None and run.plan.get("aa") is True and run.run_id != self._run_id
        ]
        return sorted(aa, key=lambda one: datetime.fromisoformat(one[1].started_at), reverse=True)

    def _measured(self, path: Path, kind: OperationKind, target: str | None) -> Floor | None:
        """Return the floor by the valid samples of one kind and target."""
        return Floor.of(
            one
            for one, verdict in self._judged(path)
            if (kind_of(one), one.axes.target) == (kind, target)
            and verdict.status is not VerdictStatus.INVALID
        )

    def _judged(self, path: Path) -> list[tuple[Sample, Verdict]]:
        if path not in self._read:
            try:
                self._read[path] = judged(read(path))
            except ResultFileError:  # damaged, or another process writes it now
                self._read[path] = []
        return self._read[path]
