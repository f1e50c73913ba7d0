"""Report: one summary per writer, setting and operation, computed from samples when asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iobench.bench import stats
from iobench.bench.verdict import Context, Reason, Verdict, combine, judge, with_verification
from iobench.report.ceiling import Ceiling, find_ceiling
from iobench.results import (
    Environment,
    Fallback,
    Operation,
    ResultFile,
    Sample,
    WorkloadFacts,
    to_plain,
)
from iobench.units import GIB, format_rate

__all__ = ["SCHEMA", "Report", "Summary", "summarise"]

SCHEMA = "iobench.report/1"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All samples of one writer at one setting, saving or restoring.

    `median_bytes_per_s` is the median of the samples' rates, `ci95_bytes_per_s` its bootstrap
    interval (None for 1 sample), `of_ceiling` its ratio to the ceiling (None without one).
    `cpu_s_per_gib` is total over total; `first_done_s`, `last_done_s` and `phases_s` are medians;
    `paths` counts operations over all samples.
    """

    writer: str
    options: Mapping[str, Any]
    operation: Operation
    samples: int
    bytes: int
    median_bytes_per_s: float
    ci95_bytes_per_s: tuple[float, float] | None
    of_ceiling: float | None
    cpu_s_per_gib: float
    first_done_s: float
    last_done_s: float
    phases_s: Mapping[str, float]
    paths: Mapping[str, int]
    fallbacks: tuple[Fallback, ...]
    verdict: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run measured: saves, fastest first, then restores."""

    schema: str = SCHEMA
    environment: Environment
    workload: WorkloadFacts
    ceiling: Ceiling
    summaries: tuple[Summary, ...]

    def document(self) -> dict[str, Any]:
        """The report as plain JSON values, described in docs/results.md."""
        document: dict[str, Any] = to_plain(self)
        return document


def summarise(result: ResultFile) -> Report:
    """The report of one result file, complete or not."""
    context = Context.of(result.run)
    ceiling = find_ceiling(result.ceiling, result.run.plan.get("no_ceiling"))
    groups: dict[str, list[Sample]] = {}
    for sample in with_verification(result.samples):
        setting = [sample.writer, to_plain(sample.options), sample.format, sample.operation]
        groups.setdefault(json.dumps(setting, sort_keys=True), []).append(sample)
    summaries = [_summary(samples, context, ceiling) for samples in groups.values()]
    summaries.sort(key=lambda one: (one.operation == "restore", -one.median_bytes_per_s))
    return Report(
        environment=result.run.environment,
        workload=result.run.workload,
        ceiling=ceiling,
        summaries=tuple(summaries),
    )


def _summary(samples: Sequence[Sample], context: Context, ceiling: Ceiling) -> Summary:
    first = samples[0]
    rates = [stats.rate(sample.bytes, sample.elapsed_s) for sample in samples]
    middle, interval = stats.median(rates), stats.bootstrap_median_interval(rates)
    limit = ceiling.of(first.operation)
    verdict = combine([judge(sample, context) for sample in samples])
    return Summary(
        writer=first.writer,
        options=first.options,
        operation=first.operation,
        samples=len(samples),
        bytes=round(stats.median([sample.bytes for sample in samples])),
        median_bytes_per_s=middle,
        ci95_bytes_per_s=(interval.low, interval.high) if interval else None,
        of_ceiling=middle / limit if limit else None,
        cpu_s_per_gib=sum(s.cpu_s for s in samples) / (sum(s.bytes for s in samples) / GIB),
        first_done_s=stats.median([sample.first_done_s for sample in samples]),
        last_done_s=stats.median([sample.last_done_s for sample in samples]),
        phases_s=_phases(samples),
        paths=_paths(samples),
        fallbacks=tuple(dict.fromkeys(one for sample in samples for one in sample.fallbacks)),
        verdict=verdict.status.value,
        reasons=tuple(str(reason) for reason in _reasons(verdict, samples, rates)),
    )


def _phases(samples: Sequence[Sample]) -> dict[str, float]:
    """The median seconds of each phase; a sample without the phase spent none in it."""
    names = dict.fromkeys(name for sample in samples for name in sample.phases_s)
    return {
        name: stats.median([sample.phases_s.get(name, 0.0) for sample in samples]) for name in names
    }


def _paths(samples: Sequence[Sample]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for sample in samples:
        for path, count in sample.paths.items():
            totals[path] = totals.get(path, 0) + count.operations
    return totals


def _reasons(verdict: Verdict, samples: Sequence[Sample], rates: Sequence[float]) -> list[Reason]:
    reasons = list(verdict.reasons)
    if len(samples) == 1:
        reasons.append(Reason(text=stats.NO_INTERVAL))
    return reasons + [
        Reason(
            text=f"repetition {samples[position].repetition} is an outlier, and is counted",
            measured=(format_rate(rates[position]),),
        )
        for position in stats.outliers(rates)
    ]
