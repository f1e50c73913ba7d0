"""The fio jobs of one run, interleaved with its contenders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from iobench.bench import fio
from iobench.bench.contenders.base import WriterContender
from iobench.bench.plan import Plan
from iobench.bench.ranks.group import Executor
from iobench.errors import FioError
from iobench.results import CeilingSample, Operation
from iobench.results.setting import at_target

# In simulations this lowers the ceiling by at most 0.1% when rates scatter by 10%, and by 0.3% when
# they scatter by 20% (docs/statistics.md).
_BEATEN = 0.95


@dataclass(frozen=True, kw_only=True)
class CeilingJobs:
    """The fio jobs of one run in one target, with files of the size of its checkpoint.

    `remaining` are the jobs that still take part. A job that fails is recorded and removed. From
    the third repetition on, a job skips an operation in which another one has beaten it: all its
    rates are less than 95% of all rates of the other. A job that is beaten in both is removed.
    """

    run_id: str
    target: str | None = None
    directory: Path
    size_bytes: int
    fallocate: bool
    executor: Executor
    """Runs each job, on all nodes of its ranks at once."""
    remaining: list[fio.FioJob] = field(default_factory=lambda: list(fio.JOBS))
    _rates: dict[Operation, dict[fio.FioJob, list[float]]] = field(
        default_factory=lambda: {"save": {}, "restore": {}}
    )

    def records(
        self, repetition: int, order: int, job: fio.FioJob, settled: Callable[[str, int], None]
    ) -> Iterator[CeilingSample]:
        """Yield a save and a restore by `job`; after a failed save there is no restore.

        A save is left out only with its restore, which needs the file. The files are removed at the
        end. `settled` is called with a description of the next operation when fio starts, and
        returns when its clock may begin.
        """
        operations: list[Operation] = ["save"]
        if not self._beaten(job, "restore"):
            operations.append("restore")
        elif self._beaten(job, "save"):
            self.remaining.remove(job)
            return
        name = at_target(f"fio {job.name}", self.target)
        try:
            for operation in operations:
                ready = partial(settled, f"{name} {operation}", repetition)
                sample = self._sample(repetition, order, job, operation, ready)
                yield sample
                if sample.error:
                    self.remaining.remove(job)
                    return
                rates = self._rates[operation].setdefault(job, [])
                rates.append(sample.bytes / sample.elapsed_s)
        finally:
            self.executor.cleanup(self.directory)

    def _beaten(self, job: fio.FioJob, operation: Operation) -> bool:
        """Return whether `job` cannot become the fastest any more, as far as two samples show."""
        rates = {one: found for one, found in self._rates[operation].items() if len(found) > 1}
        return job in rates and max(rates[job]) < _BEATEN * max(map(min, rates.values()))

    def _sample(
        self,
        repetition: int,
        order: int,
        job: fio.FioJob,
        operation: Operation,
        ready: Callable[[], None],
    ) -> CeilingSample:
        size, elapsed_s, cpu_s, error = 0, 0.0, None, None
        try:
            where, fallocate = (self.directory, self.size_bytes), self.fallocate
            started = self.executor.started(job, operation, *where, fallocate=fallocate)
            with started as measure:
                ready()
                measured = measure()
            size, elapsed_s, cpu_s = measured.bytes, measured.elapsed_s, measured.cpu_s
        except FioError as failure:
            error = str(failure)
        return CeilingSample(
            run_id=self.run_id,
            repetition=repetition,
            order=order,
            target=self.target,
            job=job.describe(),
            operation=operation,
            bytes=size,
            elapsed_s=elapsed_s,
            cpu_s=cpu_s,
            error=error,
        )


def reserves(plan: Plan) -> bool:
    """Return whether fio reserves space: it does not where all writers with that option do not."""
    chosen = [
        getattr(one.writer.options, "fallocate", None)
        for one in plan.contenders
        if isinstance(one, WriterContender)
    ]
    return any(chosen) or not any(value is False for value in chosen)
