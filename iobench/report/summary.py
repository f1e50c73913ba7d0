"""Report: one summary per writer, setting and operation, computed from samples when asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from iobench.bench.judging import stats
from iobench.bench.judging.comparison import (
    LEAST_FLOOR,
    LEAST_SAMPLES,
    fastest,
    noise_floor,
    rates_by_repetition,
    twins,
)
from iobench.bench.judging.unusual import unusual
from iobench.bench.judging.verdict import (
    Context,
    Reason,
    Verdict,
    VerdictStatus,
    combine,
    judge,
    with_verification,
)
from iobench.report.baseline import baseline_samples, paired_ratio
from iobench.report.ceiling import Ceiling, find_ceiling
from iobench.results import (
    Environment,
    Failure,
    Fallback,
    Operation,
    ResultFile,
    Sample,
    WorkloadFacts,
    contender_of,
    figure_of,
    to_plain,
)
from iobench.results.setting import HasSetting, Setting
from iobench.units import GIB, format_rate

__all__ = [
    "SCHEMA",
    "Figure",
    "Report",
    "Summary",
    "Winner",
    "group",
    "summarise",
    "verdict_of",
]

SCHEMA = "iobench.report/1"

Figure = tuple[str, Operation, str | None]
"""What `figure_of` gives."""

_RANKED = (VerdictStatus.VALID, VerdictStatus.SCALED)


@dataclass(frozen=True, kw_only=True)
class Summary(HasSetting):
    """All samples of one writer at one setting, saving or restoring.

    `median_bytes_per_s` is the median of the samples' rates, `ci95_bytes_per_s` its interval (None
    for 1 sample), `of_ceiling` its ratio to the ceiling (None without one).
    `cpu_s_per_gib` is total over total; `first_done_s`, `last_done_s` and `phases_s` are medians;
    `paths` and `decisions` count operations over all samples. `ratio` is how many times the
    baseline's rate this is, paired by repetition, and `ratio_ci95` its interval (see
    `stats.paired_log_ratio`); None without a baseline, for itself, and unless both are valid.
    """

    setting: Setting
    operation: Operation
    samples: int
    bytes: int
    median_bytes_per_s: float
    ci95_bytes_per_s: tuple[float, float] | None
    of_ceiling: float | None
    ratio: float | None = None
    ratio_ci95: tuple[float, float] | None = None
    cpu_s_per_gib: float
    first_done_s: float
    last_done_s: float
    phases_s: Mapping[str, float]
    paths: Mapping[str, int]
    fallbacks: tuple[Fallback, ...]
    decisions: Mapping[str, int]
    verdict: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The fastest of one operation, by positions in `Report.summaries`.

    Restores of all and of some tensors (`restore_as`) have a winner each.

    `equals` are those that it is not shown to be faster than, none where it won. `floor` is the
    part up to which a difference is noise; `measured` says whether this run's A/A found it.
    """

    operation: Operation
    restore_as: str | None = None
    fastest: int
    equals: tuple[int, ...]
    floor: float
    measured: bool


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run measured: saves, fastest first, then restores; what failed comes last.

    `baseline` is the contender that ratios are to, `failures` are the operations that raised.
    Figures that are INVALID or FAILED win nothing.
    """

    schema: str = SCHEMA
    environment: Environment
    workload: WorkloadFacts
    ceiling: Ceiling
    baseline: Mapping[str, Any] | None = None
    summaries: tuple[Summary, ...]
    winners: tuple[Winner, ...] = ()
    failures: tuple[Failure, ...] = ()

    def document(self) -> dict[str, Any]:
        """The report as plain JSON values, described in docs/results.md."""
        document: dict[str, Any] = to_plain(self)
        return document


def summarise(result: ResultFile) -> Report:
    """The report of one result file, complete or not."""
    context = Context.of(result.run)
    ceiling = find_ceiling(result.ceiling, result.run.plan.get("no_ceiling"))
    groups = group(result)
    baseline = result.run.plan.get("baseline")
    failed = {contender_of(failure): failure for failure in result.failures}
    pairs = [
        (
            _summary(
                samples,
                context,
                ceiling,
                against=baseline_samples(groups, baseline, samples[0]),
                failure=failed.get(contender),
            ),
            samples,
        )
        for (contender, _, _), samples in groups.items()
    ]
    pairs.sort(key=lambda pair: _rank(pair[0]))
    return Report(
        environment=result.run.environment,
        workload=result.run.workload,
        ceiling=ceiling,
        baseline=baseline,
        summaries=tuple(summary for summary, _ in pairs),
        winners=tuple(_winners(pairs)),
        failures=result.failures,
    )


def _rank(one: Summary) -> tuple[bool, str, bool, float]:
    """Saves first, then restores of all; what failed comes last, whatever its rate was."""
    kind = one.operation == "restore", one.axes.restore_as or ""
    return *kind, one.verdict == VerdictStatus.FAILED, -one.median_bytes_per_s


def _winners(pairs: Sequence[tuple[Summary, Sequence[Sample]]]) -> Iterator[Winner]:
    kinds = dict.fromkeys((summary.operation, summary.axes.restore_as) for summary, _ in pairs)
    for operation, restore_as in sorted(kinds, key=lambda kind: (kind[0] != "save", kind[1] or "")):
        ranked = [
            (position, samples)
            for position, (summary, samples) in enumerate(pairs)
            if (summary.operation, summary.axes.restore_as) == (operation, restore_as)
            and summary.verdict in _RANKED
        ]
        if not ranked:
            continue
        measured = noise_floor(sample for _, samples in ranked for sample in samples)
        floor = max(measured or 0.0, LEAST_FLOOR)
        best = fastest([samples for _, samples in ranked], floor)
        if len(ranked) > 1 or measured is not None:
            yield Winner(
                operation=operation,
                restore_as=restore_as,
                fastest=ranked[best.first][0],
                equals=tuple(ranked[position][0] for position in best.equals),
                floor=floor,
                measured=measured is not None,
            )


def group(result: ResultFile) -> dict[Figure, list[Sample]]:
    """The samples that repeat the same measurement (see `figure_of`), saves with their proof."""
    groups: dict[Figure, list[Sample]] = {}
    for sample in with_verification(result.samples, Context.of(result.run)):
        groups.setdefault(figure_of(sample), []).append(sample)
    return groups


def _summary(
    samples: Sequence[Sample],
    context: Context,
    ceiling: Ceiling,
    *,
    against: Sequence[Sample],
    failure: Failure | None,
) -> Summary:
    first = samples[0]
    rates = [stats.rate(sample.bytes, sample.elapsed_s) for sample in samples]
    middle, interval = stats.median(rates), stats.median_interval(rates)
    limit = ceiling.of(first.operation)
    verdict, ratio = verdict_of(samples, context, failure), None
    if verdict.status in _RANKED and against and verdict_of(against, context).status in _RANKED:
        ratio = paired_ratio(samples, against)
    return Summary(
        setting=first.setting,
        operation=first.operation,
        samples=len(samples),
        bytes=round(stats.median([sample.bytes for sample in samples])),
        median_bytes_per_s=middle,
        ci95_bytes_per_s=(interval.low, interval.high) if interval else None,
        of_ceiling=middle / limit if limit else None,
        ratio=ratio.ratio if ratio else None,
        ratio_ci95=(ratio.interval.low, ratio.interval.high) if ratio and ratio.interval else None,
        cpu_s_per_gib=sum(s.cpu_s for s in samples) / (sum(s.bytes for s in samples) / GIB),
        first_done_s=stats.median([sample.first_done_s for sample in samples]),
        last_done_s=stats.median([sample.last_done_s for sample in samples]),
        phases_s=_phases(samples),
        paths=_paths(samples),
        fallbacks=tuple(dict.fromkeys(one for sample in samples for one in sample.fallbacks)),
        decisions=_decisions(samples),
        verdict=verdict.status.value,
        reasons=tuple(str(reason) for reason in _reasons(verdict, samples, rates)),
    )


def verdict_of(
    samples: Sequence[Sample], context: Context, failure: Failure | None = None
) -> Verdict:
    """The worst of the samples; FAILED after an error or with wrong bytes, which rank nowhere."""
    verdict = combine([judge(sample, context) for sample in samples])
    if failure is not None:
        reason = Reason(text=failure.why)
        return Verdict(status=VerdictStatus.FAILED, reasons=(reason, *verdict.reasons))
    if any(sample.verified and sample.verified.mismatches for sample in samples):
        return replace(verdict, status=VerdictStatus.FAILED)
    return verdict


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


def _decisions(samples: Sequence[Sample]) -> dict[str, int]:
    """How often each was made, the most frequent first."""
    totals: Counter[str] = Counter()
    for sample in samples:
        totals.update(sample.decisions)
    return dict(totals.most_common())


def _reasons(verdict: Verdict, samples: Sequence[Sample], rates: Sequence[float]) -> list[Reason]:
    reasons = list(verdict.reasons)
    if len(samples) == 1:
        reasons.append(Reason(text=stats.NO_INTERVAL))
    if 0 < len(twins(samples)) < LEAST_SAMPLES:
        reasons.append(Reason(text=f"A/A of fewer than {LEAST_SAMPLES} repetitions: no floor"))
    steady = stats.steady_state(list(rates_by_repetition(samples).values()))
    if steady is not None and not steady.steady:
        measured = (f"range {100 * steady.range:.0f} %", f"drift {100 * steady.slope:.0f} %")
        reasons.append(Reason(text="not at a steady state in the last 5", measured=measured))
    return reasons + [_outlier(samples, position, rates) for position in stats.outliers(rates)]


def _outlier(samples: Sequence[Sample], position: int, rates: Sequence[float]) -> Reason:
    meanwhile = unusual(samples, position)
    if samples[position].interference is not None:
        meanwhile = meanwhile or ["nothing unusual seen"]
    return Reason(
        text=f"repetition {samples[position].repetition} is an outlier, and is counted",
        measured=(format_rate(rates[position]), *meanwhile),
    )
