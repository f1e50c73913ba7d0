"""The fio jobs of one run, interleaved with its contenders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from iobench.bench import fio
from iobench.bench.contenders.base import WriterContender
from iobench.bench.plan import Plan
from iobench.bench.targets.base import Scratch
from iobench.errors import CeilingError
from iobench.results import CeilingSample, Operation, Run
from iobench.results.setting import at_target

__all__ = ["CeilingJobs"]


@dataclass(frozen=True, kw_only=True)
class CeilingJobs:
    """The fio jobs of one run in one target, with files of the size of its checkpoint.

    `remaining` are the jobs that have not failed. A failure is recorded, and the job is removed.
    """

    run_id: str
    target: str | None = None
    directory: Path
    size_bytes: int
    fallocate: bool
    remaining: list[fio.FioJob] = field(default_factory=lambda: list(fio.JOBS))

    @classmethod
    def of(cls, run: Run, plan: Plan, scratch: Scratch, target: str | None) -> CeilingJobs:
        """Return the jobs of `run` in the directory of `scratch`, which is in `target`.

        Only for targets with a ceiling.
        """
        assert scratch.directory is not None
        return cls(
            run_id=run.run_id,
            target=target,
            directory=scratch.directory,
            size_bytes=run.workload.bytes,
            fallocate=_reserves(plan),
        )

    def records(
        self, repetition: int, order: int, job: fio.FioJob, settled: Callable[[str, int], None]
    ) -> Iterator[CeilingSample]:
        """Yield a save and a restore by `job`; after a failed save there is no restore.

        The files are removed at the end. `settled` is called with a description of the next
        operation and returns when that operation may begin.
        """
        operations: tuple[Operation, ...] = ("save", "restore")
        name = at_target(f"fio {job.name}", self.target)
        try:
            for operation in operations:
                settled(f"{name} {operation}", repetition)
                sample = self._sample(repetition, order, job, operation)
                yield sample
                if sample.error:
                    self.remaining.remove(job)
                    return
        finally:
            fio.cleanup(self.directory)

    def _sample(
        self, repetition: int, order: int, job: fio.FioJob, operation: Operation
    ) -> CeilingSample:
        size, elapsed_s, cpu_s, error = 0, 0.0, None, None
        try:
            measured = fio.run_job(
                job, operation, self.directory, self.size_bytes, fallocate=self.fallocate
            )
            size, elapsed_s, cpu_s = measured.bytes, measured.elapsed_s, measured.cpu_s
        except CeilingError as failure:
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


def _reserves(plan: Plan) -> bool:
    """Return whether fio reserves space: it does not where all writers with that option do not."""
    chosen = [
        getattr(one.writer.options, "fallocate", None)
        for one in plan.contenders
        if isinstance(one, WriterContender)
    ]
    return any(chosen) or not any(value is False for value in chosen)
