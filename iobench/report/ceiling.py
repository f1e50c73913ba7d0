"""The ceiling: the rate of the best of several fio jobs on the same directory in the same run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from iobench.bench.judging.stats import median, rate
from iobench.results import CeilingSample, Operation, ResultFile, to_plain

__all__ = ["NO_JOB", "Ceiling", "find_ceiling", "find_ceilings"]

NO_JOB = "no fio job ran"
"""The reason that a ceiling has where no job ran and no other reason is known."""


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
