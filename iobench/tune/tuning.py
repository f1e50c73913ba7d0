"""Tuning: a checked request for a tuning, and its run with trial runner, journal and tuner."""

from __future__ import annotations

import secrets
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iobench import workloads
from iobench._version import __version__
from iobench.bench.contenders.base import WriterContender
from iobench.bench.judging.verdict import Context, volatile_of
from iobench.bench.targets.base import Target
from iobench.bench.targets.choose import target_of
from iobench.environment import fingerprint
from iobench.environment.memory import available_bytes
from iobench.errors import ResultFileError, TargetError, UsageError
from iobench.goodput.job import TrainingJob
from iobench.results import utc_now
from iobench.tune.budget import Budget
from iobench.tune.candidate import Candidate
from iobench.tune.journal import Journal, TrialRecord, TuningRecord
from iobench.tune.measurement import Measure, Measurement, Step
from iobench.tune.objective import Objective
from iobench.tune.outcome import Outcome
from iobench.tune.rounds import TuningProgress
from iobench.tune.sizes import TuningSizes
from iobench.tune.space import Space, space_of
from iobench.tune.stall import SLOTS
from iobench.tune.trial_runner import TrialRunner, warm_up_bytes
from iobench.tune.tuner import Tuner
from iobench.units import GIB, format_size
from iobench.workloads import Workload

__all__ = ["POOL_BYTES", "Tuning", "run_tuning"]

_LARGEST = GIB  # of one trial, unless the user asks for more
_CONFIRMED = 24  # trials of that size: four settings, six times
_CONFIRM_SHARE = 0.4  # of the bytes that may be written
POOL_BYTES = GIB


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A tuning that is ready to run. `asked` is the request as plain values, for the journal."""

    asked: Mapping[str, Any]
    workload: Workload
    rank: int
    target: Target
    space: Space
    objective: Objective
    seed: int
    largest_bytes: int
    """Limit for one trial; the tuner may choose less unless `fixed`."""
    fixed: bool
    max_s: float
    max_bytes: int
    own_server: bool = False
    """Whether the target is on a server that ends with this tuning."""

    @classmethod
    def of(
        cls,
        *,
        workload: str,
        target: str,
        objective: str = "save",
        writers: Sequence[str] | None = None,
        rank: int = 0,
        size_bytes: int | None = None,
        max_s: float,
        max_bytes: int,
        max_memory_bytes: int | None = None,
        max_cpu_s_per_gib: float | None = None,
        job: Mapping[str, Any] | None = None,
        seed: int | None = None,
        largest_bytes: int | None = None,
        own_server: bool = False,
    ) -> Tuning:
        """Return a checked tuning: names known, target writable, a writer available.

        Writes nothing yet. `size_bytes` fixes the size of a confirmation. `largest_bytes` is the
        size that the first run chose: a resumed tuning passes it, because free disk and memory may
        have changed. Raises UsageError and its subclasses, TargetError, UnavailableError.
        """
        seed = secrets.randbits(32) if seed is None else seed
        budget = Budget(max_s=max_s, max_bytes=max_bytes)
        full = workloads.load(workload)
        if not full.files(rank):
            raise UsageError(f"workload {full.name!r}: rank {rank} writes no files; choose another")
        goal = Objective(
            goal=objective,
            job=None if job is None else TrainingJob(**job),
            full_bytes=full.size_bytes(rank),
            max_memory_bytes=max_memory_bytes,
            max_cpu_s_per_gib=max_cpu_s_per_gib,
        )
        if "://" not in target:
            target_of(target, []).check()
        space = space_of(target, writers)
        place = target_of(target, [WriterContender(space.baseline.make())])
        place.check()
        largest = largest_bytes or _largest(goal, place, size_bytes, budget.max_bytes)
        full.scaled(largest, rank)  # raises with the smallest possible size
        return cls(
            asked={
                "workload": workload,
                "target": place.location,
                "objective": objective,
                "writers": None if writers is None else list(writers),
                "rank": rank,
                "size_bytes": size_bytes,
                "max_s": budget.max_s,
                "max_bytes": budget.max_bytes,
                "max_memory_bytes": max_memory_bytes,
                "max_cpu_s_per_gib": max_cpu_s_per_gib,
                "job": None if job is None else dict(job),
                "seed": seed,
                "largest_bytes": largest,
                "own_server": own_server,
            },
            workload=full,
            rank=rank,
            target=place,
            space=space,
            objective=goal,
            seed=seed,
            largest_bytes=largest,
            fixed=size_bytes is not None,
            max_s=budget.max_s,
            max_bytes=budget.max_bytes,
            own_server=own_server,
        )

    @classmethod
    def resumed(cls, header: TuningRecord) -> Tuning:
        """Return the tuning of `header`. Raises UsageError on another machine or storage."""
        if header.asked.get("own_server"):
            raise UsageError("this journal is of --s3-local, whose server is gone; start anew")
        tuning = cls.of(**header.asked)
        here = tuning.header().fingerprint
        if here != header.fingerprint:
            raise UsageError(
                f"this journal was begun on another machine or storage ({header.fingerprint} and "
                f"not {here}): its samples do not go together with new ones; start anew"
            )
        return tuning

    @property
    def full_bytes(self) -> int:
        """Bytes of the rank's checkpoint at full size."""
        return self.objective.full_bytes

    def actual_bytes(self, wanted_bytes: int) -> int:
        """Return the bytes of the checkpoint for `wanted_bytes`, computed from its layout."""
        return self.workload.scaled(wanted_bytes, self.rank).size_bytes(self.rank)

    def header(self) -> TuningRecord:
        """Return the first line of its journal."""
        machine, storage = self.target.describe()
        return TuningRecord(
            started_at=utc_now(),
            command=("iobench", *sys.argv[1:]),
            iobench=__version__,
            asked=self.asked,
            machine=machine,
            storage=storage,
            fingerprint=fingerprint(machine, storage),
        )

    def sizes(self) -> TuningSizes:
        """Return the sizes to begin with."""
        return TuningSizes(confirm=self.largest_bytes, fixed=self.fixed, fits=self._fits)

    def tuner(self, measure: Measure, progress: TuningProgress) -> Tuner:
        """Return the tuner, which calls `measure` for every trial."""
        return Tuner(
            space=self.space,
            objective=self.objective,
            budget=Budget(max_s=self.max_s, max_bytes=self.max_bytes),
            sizes=self.sizes(),
            measure=measure,
            written_bytes=self.written_bytes,
            progress=progress,
            seed=self.seed,
            context=Context(
                workload_bytes=0,
                scale=f"{format_size(self.actual_bytes(self.largest_bytes))} at most"
                if self.largest_bytes < self.full_bytes
                else None,
                volatile=volatile_of(self.target.describe()[1]),
            ),
        )

    def written_bytes(self, wanted_bytes: int, verify: bool) -> int:
        """Return the most bytes that a trial of that size writes."""
        copies = self.objective.writes(verify)
        return self.actual_bytes(wanted_bytes) * copies + warm_up_bytes(wanted_bytes)

    def _fits(self, size_bytes: int) -> bool:
        try:
            self.workload.scaled(size_bytes, self.rank)
        except UsageError:
            return False
        return True


def _largest(objective: Objective, target: Target, size_bytes: int | None, max_bytes: int) -> int:
    """Return the first size of a confirmation. Raises TargetError where `size_bytes` is too much.

    It is at most half of the available memory. Confirming four settings six times at this size
    leaves the larger part of `max_bytes` to the race.
    """
    held = SLOTS + 1 if objective.goal == "stall" else 1
    free, memory = target.free_bytes(), available_bytes()
    room = min(
        objective.full_bytes,
        *([] if free is None else [free // held]),
        *([] if memory is None else [memory // (2 * held)]),
    )
    if size_bytes is not None:
        if room < min(size_bytes, objective.full_bytes):
            raise TargetError(
                f"--size {format_size(size_bytes)}: {format_size(room)} are the most that disk and "
                "memory have room for"
            )
        return min(size_bytes, objective.full_bytes)
    share = int(_CONFIRM_SHARE * max_bytes) // (_CONFIRMED * objective.writes(verify=False))
    return min(_LARGEST, room, max(share, 1))


def run_tuning(
    tuning: Tuning, journal: Journal, progress: TuningProgress, *, began_s: float
) -> Outcome:
    """Run or resume `tuning`: trials in the journal are not measured again.

    `began_s`, of time.perf_counter, is when its time began to count. Nothing stays in the target,
    however it ends.
    """
    recorded = deque(journal.trials)
    with TrialRunner.on(
        tuning.target,
        workload=tuning.workload,
        rank=tuning.rank,
        objective=tuning.objective,
        seed=tuning.seed,
        pool_bytes=POOL_BYTES,
        began_s=began_s,
    ) as rig:

        def measure(candidate: Candidate, step: Step) -> Measurement:
            if recorded:
                known = recorded.popleft()
                if not known.answers(candidate, step):
                    raise ResultFileError(
                        f"{journal.path} does not fit this iobench {__version__} or this machine's "
                        f"writers (it was written by {journal.header.iobench}); start anew"
                    )
                return known.measured
            measured = rig(candidate, step)
            journal.write(TrialRecord.of(candidate, step, measured))
            return measured

        return tuning.tuner(measure, progress).run()
