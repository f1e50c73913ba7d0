"""Two runs side by side: for each contender and operation a ratio, its interval and a finding."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iobench.bench.judging.comparison import (
    LEAST_FLOOR,
    LEAST_SAMPLES,
    Finding,
    compare_runs,
    noise_floor,
)
from iobench.bench.judging.stats import median, rate
from iobench.bench.judging.verdict import Context, Verdict, VerdictStatus
from iobench.report.alike import unlike
from iobench.report.summary import Figure, group, verdict_of
from iobench.results import Operation, ResultFile, Sample, contender_of, to_plain
from iobench.results.setting import HasSetting, Setting

__all__ = ["SCHEMA", "Comparison", "ComparisonRow", "compare"]

SCHEMA = "iobench.compare/1"

_Key = Figure
_SPOILT = (VerdictStatus.INVALID, VerdictStatus.FAILED)


@dataclass(frozen=True, kw_only=True)
class ComparisonRow(HasSetting):
    """One contender's saves or restores in both runs.

    `ratio` is of the new rate to the old one, `ci95` its interval, `floor` the part that counts as
    noise; see docs/statistics.md. `finding` is None where a run's samples are INVALID, or FAILED:
    such figures are not judged; `spoilt` where only the new ones are. `regression` is set where it
    is worse, and by more than the threshold.
    """

    workload: str
    setting: Setting
    operation: Operation
    old_samples: int
    new_samples: int
    old_bytes_per_s: float
    new_bytes_per_s: float
    ratio: float
    ci95: tuple[float, float] | None
    floor: float
    finding: Finding | None
    regression: bool
    spoilt: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`unlike` says what differs between the runs; `missing` and `added` who is in one only.

    `failed` are those that were measured before and failed now before they had a sample, with why.
    """

    schema: str = SCHEMA
    workload: str
    old: str
    new: str
    threshold: float
    unlike: tuple[str, ...]
    rows: tuple[ComparisonRow, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    failed: Mapping[str, str]

    @property
    def regressions(self) -> list[ComparisonRow]:
        return [row for row in self.rows if row.regression]

    @property
    def spoilt(self) -> list[str]:
        """Who was VALID before and is INVALID or FAILED now."""
        rows = [f"{row.setting.name} {row.operation}" for row in self.rows if row.spoilt]
        return [*rows, *self.failed]

    def document(self) -> dict[str, Any]:
        """The comparison as plain JSON values, described in docs/results.md."""
        document: dict[str, Any] = to_plain(self)
        return document


def compare(old: ResultFile, new: ResultFile, threshold: float) -> Comparison:
    """Every contender that both runs have. `threshold` is a part: 0.05 for 5 %."""
    before, after = group(old), group(new)
    failures = {contender_of(failure): failure for failure in new.failures}
    kinds = {(operation, restore_as) for _, operation, restore_as in before}
    tried = {*after, *((contender, *kind) for contender in failures for kind in kinds)}
    pairs = _pairs(before, tried)
    then, now = _verdicts(old, before), _verdicts(new, after)
    rows = [
        _row(new.run.workload.name, before[one], after[other], (then[one], now[other]), threshold)
        for one, other in pairs
        if other in after
    ]
    rows.sort(key=lambda row: row.operation == "restore")
    return Comparison(
        workload=new.run.workload.name,
        old=str(old.path),
        new=str(new.path),
        threshold=threshold,
        unlike=tuple(unlike(old.run, new.run)),
        rows=tuple(rows),
        missing=_names(before, {one for one, _ in pairs}),
        added=_names(after, {other for _, other in pairs}),
        failed={
            _name(before[one]): failures[other[0]].why for one, other in pairs if other not in after
        },
    )


def _verdicts(result: ResultFile, groups: Mapping[_Key, Sequence[Sample]]) -> dict[_Key, Verdict]:
    context = Context.of(result.run)
    failures = {contender_of(failure): failure for failure in result.failures}
    return {
        key: verdict_of(samples, context, failures.get(key[0])) for key, samples in groups.items()
    }


def _pairs(before: Collection[_Key], after: Collection[_Key]) -> list[tuple[_Key, _Key]]:
    """Equal settings; then, where one is left of a writer in both runs, those two."""
    pairs = [(key, key) for key in before if key in after]
    for key in before:
        if key in after:
            continue
        left = [_others(key, groups, before, after) for groups in (before, after)]
        if [len(keys) for keys in left] == [1, 1]:
            pairs.append((key, left[1][0]))
    return pairs


def _others(
    key: _Key, groups: Collection[_Key], before: Collection[_Key], after: Collection[_Key]
) -> list[_Key]:
    """The keys in `groups` of the same writer and operation, without those in both runs."""
    return [
        other
        for other in groups
        if not (other in before and other in after)
        and (_writer(other), other[1:]) == (_writer(key), key[1:])
    ]


def _writer(key: _Key) -> str:
    writer: str = json.loads(key[0])[0]
    return writer


def _names(groups: Mapping[_Key, Sequence[Sample]], matched: set[_Key]) -> tuple[str, ...]:
    return tuple(_name(samples) for key, samples in groups.items() if key not in matched)


def _name(samples: Sequence[Sample]) -> str:
    return f"{samples[0].setting.name} {samples[0].operation}"


def _row(
    workload: str,
    old: Sequence[Sample],
    new: Sequence[Sample],
    verdicts: tuple[Verdict, Verdict],
    threshold: float,
) -> ComparisonRow:
    floors = [floor for side in (old, new) if (floor := noise_floor(side)) is not None]
    difference = compare_runs(new, old, max(floors, default=LEAST_FLOOR))
    ratio = difference.ratio
    spoilt = {
        when: f"{verdict.status} {when}: {verdict.reasons[0]}"
        for when, verdict in zip(("before", "now"), verdicts, strict=True)
        if verdict.status in _SPOILT
    }
    finding = None if spoilt else difference.finding
    return ComparisonRow(
        workload=workload,
        setting=new[0].setting,
        operation=new[0].operation,
        old_samples=len(old),
        new_samples=len(new),
        old_bytes_per_s=_middle(old),
        new_bytes_per_s=_middle(new),
        ratio=ratio.ratio,
        ci95=(ratio.interval.low, ratio.interval.high) if ratio.interval else None,
        floor=difference.floor,
        finding=finding,
        regression=finding is Finding.WORSE and ratio.ratio < 1 - threshold,
        spoilt="now" in spoilt and "before" not in spoilt,
        notes=(
            *spoilt.values(),
            *_changed_options(old[0].options, new[0].options),
            *_too_few(ratio.samples),
        ),
    )


def _too_few(repetitions: int) -> list[str]:
    if repetitions >= LEAST_SAMPLES:
        return []
    return [f"{repetitions} repetitions cannot show a difference; --repeat {LEAST_SAMPLES}"]


def _changed_options(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*old, *new])
    return [
        f"{name}: {_value(old, name)} before, {_value(new, name)} now"
        for name in names
        if name not in old or name not in new or old[name] != new[name]
    ]


def _value(options: Mapping[str, Any], name: str) -> str:
    return str(options[name]) if name in options else "no such option"


def _middle(samples: Sequence[Sample]) -> float:
    return median([rate(sample.bytes, sample.elapsed_s) for sample in samples])
