"""Report of a result file: one summary per writer, setting and operation, from its samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from iobench.bench.judging.ceiling import Ceiling, find_ceilings, why_above
from iobench.bench.judging.floors import floors_beside
from iobench.bench.judging.ranks import rank_rates
from iobench.bench.judging.rules import RulesKept, rules_kept
from iobench.bench.judging.verdict import (
    Context,
    Reason,
    Verdict,
    VerdictStatus,
    combine,
    has_wrong_bytes,
    judge,
    with_verification,
)
from iobench.errors import ResultFileError
from iobench.report.winners import (
    RANKED,
    BackgroundRates,
    Summary,
    Winner,
    baseline_samples,
    find_target_winners,
    find_winners,
)
from iobench.results import (
    Environment,
    Failure,
    MemoryUse,
    ResultFile,
    Run,
    Sample,
    WorkloadFacts,
    WorldFacts,
    contender_of,
)
from iobench.results.identity import Figure, groups
from iobench.results.setting import IF_SET, labels
from iobench.stats.comparison import (
    LEAST_SAMPLES,
    compare_paired,
    rates,
    rates_by_repetition,
    twins,
)
from iobench.stats.estimates import (
    NO_INTERVAL,
    Ratio,
    median,
    median_interval,
    outliers,
    steady_state,
)
from iobench.stats.over_time import OverTime, over_time
from iobench.text import printable
from iobench.units import GIB, format_rate, format_seconds, format_size
from iobench.writers.transfer import Latency, LatencyFigures

SCHEMA = "iobench.report/1"


_LEAST_INTERVALS = 5
NOT_KEPT = "{} not kept: {}"

NOT_STEADY = "not at a steady state in the last 5"
"""Start of the reason for a series whose last samples still change."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of a run: saves, fastest first, then restores; FAILED ones come last in each.

    `baseline` is the contender that ratios refer to. `failures` are the operations that raised.
    `rules` are those of a published benchmark that the run was to keep. `world` has the ranks of a
    launcher. INVALID or FAILED figures cannot win. `record` is the path
    of the result file, `target` the measured place. `stopped` is why a run is incomplete.

    A run of several targets has a ceiling of each in `ceilings`, and no figure in `ceiling`.
    `target_winners` are the fastest targets of each operation.
    """

    schema: str = SCHEMA
    environment: Environment
    workload: WorkloadFacts
    rules: RulesKept | None = field(default=None, metadata=IF_SET)
    world: WorldFacts | None = field(default=None, metadata=IF_SET)
    ceiling: Ceiling
    ceilings: Mapping[str, Ceiling] = field(default_factory=dict, metadata=IF_SET)
    baseline: Mapping[str, Any] | None = None
    summaries: tuple[Summary, ...]
    winners: tuple[Winner, ...] = ()
    target_winners: tuple[Winner, ...] = field(default=(), metadata=IF_SET)
    failures: tuple[Failure, ...] = ()
    record: str | None = None
    target: str | None = None
    stopped: str | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """The locations of several targets; empty in a run of one."""
        return tuple(self.environment.storages)


def summarise(result: ResultFile) -> Report:
    """Return the report of one result file, complete or not."""
    return summarise_with_samples(result)[0]


def summarise_with_samples(result: ResultFile) -> tuple[Report, tuple[Sequence[Sample], ...]]:
    """Return the report, and the samples of each of its summaries; saves have a verification."""
    context = Context.of(result.run)
    rules = rules_kept(result.run, result.samples)
    ceilings = find_ceilings(result)
    by_figure = group(result)
    baseline = _baseline(result)
    failed = {contender_of(failure): failure for failure in result.failures}
    saves = [one for one in result.samples if one.operation == "save"]
    pairs = [
        (
            _summary(
                samples,
                context,
                ceilings.get(samples[0].axes.target, Ceiling()),
                against=baseline_samples(by_figure, baseline, samples[0]),
                alone=baseline_samples(by_figure, {"background": None}, samples[0]),
                failure=failed.get(contender),
                run=result.run,
                saves=saves,
                rules=rules,
            ),
            samples,
        )
        for (contender, _, _), samples in by_figure.items()
    ]
    pairs.sort(key=lambda pair: _rank(pair[0]))
    names = labels(summary.setting for summary, _ in pairs)
    rows = [
        (replace(summary, label=name), samples)
        for name, (summary, samples) in zip(names, pairs, strict=True)
    ]
    recorded = floors_beside(result)
    targets, target = tuple(result.run.environment.storages), result.run.plan.get("target")
    report = Report(
        environment=result.run.environment,
        workload=result.run.workload,
        rules=rules,
        world=result.run.world,
        ceiling=ceilings.get(None, Ceiling(reason="each of the targets has its own")),
        ceilings={target: one for target, one in ceilings.items() if target is not None},
        baseline=baseline,
        summaries=tuple(summary for summary, _ in rows),
        winners=tuple(find_winners(rows, baseline, recorded)),
        target_winners=tuple(find_target_winners(rows, targets, recorded)),
        failures=result.failures,
        record=printable(str(result.path)),
        target=target if isinstance(target, str) else None,
        stopped=result.incomplete,
    )
    return report, tuple(samples for _, samples in rows)


def _baseline(result: ResultFile) -> Mapping[str, Any] | None:
    given = result.run.plan.get("baseline")
    if given is None:
        return None
    if isinstance(given, Mapping) and (
        "options" in given if "name" in given else given.get("label")
    ):
        return given
    raise ResultFileError(
        f"{result.path}, line 1: plan.baseline must have a name and options, or a label"
    )


def _rank(one: Summary) -> tuple[bool, str, bool, float]:
    """Return the sort key: saves, full restores, partial restores; FAILED ones last in each."""
    kind = one.operation == "restore", one.axes.restore_as or ""
    return *kind, one.verdict == VerdictStatus.FAILED, -one.median_bytes_per_s


def group(result: ResultFile) -> dict[Figure, list[Sample]]:
    """Group samples that repeat a measurement (see `figure_of`); saves get their verification."""
    return groups(with_verification(result.samples, Context.of(result.run)))


def _summary(
    samples: Sequence[Sample],
    context: Context,
    ceiling: Ceiling,
    *,
    against: Sequence[Sample],
    alone: Sequence[Sample],
    failure: Failure | None,
    run: Run,
    saves: Sequence[Sample],
    rules: RulesKept | None,
) -> Summary:
    first = samples[0]
    rates = list(rates_by_repetition(samples).values())
    middle, interval = median(rates), median_interval(rates)
    limit = ceiling.of(first.operation)
    above = why_above(run, ceiling, first.operation, middle, interval)
    lasted = _over_time(samples, saves, run)
    verdict = verdict_of(samples, context, failure)

    def ratio_to(others: Sequence[Sample]) -> Ratio | None:
        able = others and {verdict.status, verdict_of(others, context).status} <= {*RANKED}
        found = compare_paired(samples, others) if able else None
        return None if found is None else found.ratio

    ratio = ratio_to(against)
    return Summary(
        setting=first.setting,
        operation=first.operation,
        samples=len(samples),
        repetitions=len(rates),
        bytes=round(median([sample.bytes for sample in samples])),
        median_bytes_per_s=middle,
        ci95_bytes_per_s=interval,
        of_ceiling=middle / limit if limit else None,
        ratio=ratio.ratio if ratio else None,
        ratio_ci95=ratio.interval if ratio else None,
        cpu_s_per_gib=sum(s.cpu_s for s in samples) / (sum(s.bytes for s in samples) / GIB),
        device_idle=_device_idle(samples),
        memory=_memory(samples),
        first_done_s=median([sample.first_done_s for sample in samples]),
        last_done_s=median([sample.last_done_s for sample in samples]),
        over_time=lasted,
        ranks=rank_rates(samples, run.world),
        background_rates=_background(samples, ratio_to(alone)),
        phases_s=_phases(samples),
        paths=_totals(
            {path: count.operations for path, count in one.paths.items()} for one in samples
        ),
        fallbacks=tuple(dict.fromkeys(one for sample in samples for one in sample.fallbacks)),
        decisions=dict(_totals(one.decisions for one in samples).most_common()),
        latencies=_latencies(samples),
        verdict=verdict.status.value,
        reasons=(
            *map(str, _reasons(verdict, samples, lasted)),
            *filter(None, [above]),
            *((NOT_KEPT.format(rules.title, one) for one in rules.not_kept) if rules else ()),
        ),
    )


def verdict_of(
    samples: Sequence[Sample], context: Context, failure: Failure | None = None
) -> Verdict:
    """Return the worst verdict of the samples; FAILED after an error or with wrong bytes."""
    verdict = combine([judge(sample, context) for sample in samples])
    if failure is not None:
        reason = Reason(text=failure.why)
        return Verdict(status=VerdictStatus.FAILED, reasons=(reason, *verdict.reasons))
    if has_wrong_bytes(samples):
        return replace(verdict, status=VerdictStatus.FAILED)
    return verdict


def _background(samples: Sequence[Sample], kept: Ratio | None) -> BackgroundRates | None:
    found = [(one.background_restores, one.elapsed_s) for one in samples]
    known = [(one, elapsed_s) for one, elapsed_s in found if one is not None and not one.error]
    if not known:
        return None
    return BackgroundRates(
        writer=known[0][0].writer,
        median_bytes_per_s=median([one.bytes / elapsed_s for one, elapsed_s in known]),
        kept=kept.ratio if kept else None,
        kept_ci95=kept.interval if kept else None,
    )


def _device_idle(samples: Sequence[Sample]) -> float | None:
    """Return the median part of the intervals in which the device's counter did not grow.

    A shorter sample than half a second has too few intervals.
    """
    parts = [
        one.series.counted.count(0) / len(one.series.counted)
        for one in samples
        if one.series is not None
        and one.series.counter == "device"
        and one.series.counted is not None
        and len(one.series.counted) >= _LEAST_INTERVALS
    ]
    return median(parts) if parts else None


def _memory(samples: Sequence[Sample]) -> MemoryUse | None:
    known = [sample.memory for sample in samples if sample.memory]
    process = [one.process_bytes for one in known if one.process_bytes is not None]
    cached = [one.page_cache_bytes for one in known if one.page_cache_bytes is not None]
    if not process:
        return None
    return MemoryUse(
        process_bytes=round(median(process)),
        page_cache_bytes=round(median(cached)) if cached else None,
    )


def _phases(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the median seconds of each phase; a sample without the phase counts as 0 s."""
    names = dict.fromkeys(name for sample in samples for name in sample.phases_s)
    return {name: median([sample.phases_s.get(name, 0.0) for sample in samples]) for name in names}


def _totals(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Return the sum of each name."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total


def _latencies(samples: Sequence[Sample]) -> dict[str, LatencyFigures]:
    """Return the figures of each kind of operation; those of all samples are pooled."""
    names = dict.fromkeys(name for sample in samples for name in sample.latencies)
    totals = {
        name: Latency.total(one.latencies[name] for one in samples if name in one.latencies)
        for name in names
    }
    return {name: LatencyFigures.of(one) for name, one in totals.items() if one.count}


def _over_time(samples: Sequence[Sample], saves: Sequence[Sample], run: Run) -> OverTime | None:
    """Return how the rate went where saves follow each other for a time; None elsewhere."""
    round_s = run.plan.get("round_s")
    if samples[0].operation != "save" or not isinstance(round_s, int | float) or round_s <= 0:
        return None
    same = [one for one in saves if one.axes.target == samples[0].axes.target]
    return over_time(samples, same, round_s)


def _reasons(verdict: Verdict, samples: Sequence[Sample], lasted: OverTime | None) -> list[Reason]:
    reasons = list(verdict.reasons)
    by_repetition = list(rates_by_repetition(samples).values())
    if len(by_repetition) == 1:
        reasons.append(Reason(text=NO_INTERVAL))
    if 0 < len(twins(samples)) < LEAST_SAMPLES:
        reasons.append(Reason(text=f"A/A of fewer than {LEAST_SAMPLES} repetitions: no floor"))
    steady = steady_state(by_repetition) if lasted is None else lasted.state
    if steady is not None and not steady.steady:
        measured = (f"range {100 * steady.range:.0f}%", f"drift {100 * steady.slope:.0f}%")
        reasons.append(Reason(text=NOT_STEADY, measured=measured))
    return reasons + [_outlier(samples, one) for one in outliers(rates(samples))]


def _outlier(samples: Sequence[Sample], position: int) -> Reason:
    measured = format_rate(rates(samples)[position]), disturbances(samples[position])
    return Reason(
        text=f"repetition {samples[position].repetition + 1} is an outlier, and is counted",
        measured=tuple(filter(None, measured)),
    )


_PART = 0.01  # of the sample's time or bytes: a smaller disturbance explains nothing
_WORDS: Mapping[str, Callable[[float], str]] = {
    "steal_s": lambda amount: f"{format_seconds(amount)} of CPU stolen",
    "memory_stall_s": lambda amount: f"{format_seconds(amount)} of waiting for memory",
    "foreign_read_bytes": lambda amount: f"{format_size(amount)} read by others",
    "foreign_write_bytes": lambda amount: f"{format_size(amount)} written by others",
}


def disturbances(sample: Sample) -> str:
    """Return in words what others did while the clock ran; empty where it was not recorded.

    It counts if it took at least 1% of the sample's time (stolen CPU, waiting for memory) or bytes
    (others' I/O on the device).
    """
    if sample.interference is None:
        return ""
    found = []
    for name, words in _WORDS.items():
        whole = sample.elapsed_s if name.endswith("_s") else sample.bytes
        amount = getattr(sample.interference, name)
        if amount is not None and amount >= _PART * whole:
            found.append(words(amount))
    return ", ".join(found) or "nothing unusual seen"
