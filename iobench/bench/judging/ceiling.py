"""The rate of the best of several fio jobs on the same directory in the same run.

It is called a ceiling in code and in records only: a writer can be faster, and `why_above` says
what may explain that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from iobench.bench.judging.verdict import repeats_every
from iobench.results import CeilingSample, Operation, ResultFile, Run, to_plain
from iobench.stats.estimates import median, rate

ABOVE_FIO = "above fio: "
"""Start of the reason of a rate of more than 105% of fio's."""
NO_JOB = "no fio job ran"
"""The reason that fio has no rate where no job ran and no other reason is known."""

_ABOVE = 1.05


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """Bytes per second of the best job of each operation, and that job; None if not measured.

    `reason` says why an operation has no ceiling; None when both have one.
    """

    save_bytes_per_s: float | None = None
    restore_bytes_per_s: float | None = None
    save_job: Mapping[str, Any] | None = None
    restore_job: Mapping[str, Any] | None = None
    reason: str | None = None

    def of(self, operation: Operation) -> float | None:
        """Return the rate of `operation` in bytes per second; None if not measured."""
        return self.save_bytes_per_s if operation == "save" else self.restore_bytes_per_s

    def job_of(self, operation: Operation) -> Mapping[str, Any]:
        """Return the best job of `operation`; empty if not measured."""
        return (self.save_job if operation == "save" else self.restore_job) or {}


def why_above(
    run: Run,
    ceiling: Ceiling,
    operation: Operation,
    bytes_per_s: float,
    interval: tuple[float, float] | None,
) -> str | None:
    """Return what may explain a rate of more than 105% of fio's; None for a lower one.

    The causes are those that were seen: docs/statistics.md. A record from before a property of the
    jobs was recorded counts as without it.
    """
    limit, job = ceiling.of(operation), ceiling.job_of(operation)
    if not limit or bytes_per_s <= _ABOVE * limit:
        return None
    if interval is not None and interval[0] <= limit:
        low, high = (f"{100 * bound / limit:.0f}%" for bound in interval)
        return f"{ABOVE_FIO}not shown, the interval is {low} to {high}"
    causes = {
        "fio's buffers are in small pages": not job.get("huge_pages"),
        "fio's buffers repeat": operation == "save" and not job.get("refill_buffers"),
        "the data repeat": repeats_every(run) is not None,
        "the host may cache what was saved": operation == "restore"
        and run.environment.machine.cpu.virtual is True,
    }
    found = "; ".join(cause for cause, applies in causes.items() if applies)
    return ABOVE_FIO + (found or "fio's four jobs are not the fastest that is possible here")


def find_ceilings(result: ResultFile) -> dict[str | None, Ceiling]:
    """Return the ceiling of each target; the key is None in a run of one target."""
    why_none = result.run.plan.get("no_ceiling")
    if not result.run.environment.storages:
        return {None: find_ceiling(result.ceiling, why_none)}
    reasons = why_none if isinstance(why_none, Mapping) else {}
    return {
        target: find_ceiling(
            (sample for sample in result.ceiling if sample.target == target), reasons.get(target)
        )
        for target in result.run.environment.storages
    }


def find_ceiling(samples: Iterable[CeilingSample], why_none: str | None = None) -> Ceiling:
    """Return for each operation the job with the highest median rate. Failed samples do not count.

    `why_none` is the reason why the run planned no job.
    """
    given = list(samples)
    save, save_job = _best(given, "save")
    restore, restore_job = _best(given, "restore")
    return Ceiling(
        save_bytes_per_s=save,
        restore_bytes_per_s=restore,
        save_job=save_job,
        restore_job=restore_job,
        reason=_why_not(given, save, restore, why_none),
    )


def _best(
    samples: list[CeilingSample], operation: Operation
) -> tuple[float | None, Mapping[str, Any] | None]:
    rates: dict[str, list[float]] = {}
    jobs: dict[str, Mapping[str, Any]] = {}
    for sample in samples:
        if sample.operation == operation and sample.error is None:
            key = json.dumps(to_plain(sample.job), sort_keys=True)
            jobs[key] = sample.job
            rates.setdefault(key, []).append(rate(sample.bytes, sample.elapsed_s))
    if not rates:
        return None, None
    medians = {key: median(values) for key, values in rates.items()}
    best = max(medians, key=medians.__getitem__)
    return medians[best], jobs[best]


def _why_not(
    samples: list[CeilingSample], save: float | None, restore: float | None, why_none: str | None
) -> str | None:
    missing = [name for name, value in (("save", save), ("restore", restore)) if value is None]
    if not missing:
        return None
    errors = dict.fromkeys(
        sample.error for sample in samples if sample.error and sample.operation in missing
    )
    why = next(iter(errors), why_none or NO_JOB)
    return why if len(missing) == 2 else f"{missing[0]}: {why}"
