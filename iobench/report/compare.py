"""Comparison of old and new runs, and its document: a ratio and a finding for each contender."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from iobench.bench.judging.ceiling import find_ceilings
from iobench.bench.judging.floors import Floor, RecordedFloor, floors_beside, kind_of
from iobench.bench.judging.verdict import Context, Reason, Verdict, VerdictStatus
from iobench.peers import PREFIX
from iobench.report.document import Document, Line
from iobench.report.facts import environment_section, repeat_section, unlike
from iobench.report.grid import Column, Grid, span
from iobench.report.summary import group, verdict_of
from iobench.results import Operation, ResultFile, Sample, contender_of, to_plain
from iobench.results.identity import Figure
from iobench.results.setting import IF_SET, HasSetting, Setting, at_target, labels
from iobench.stats.comparison import (
    LEAST_SAMPLES,
    Finding,
    compare_runs,
    control_floor,
    rates,
    rates_by_repetition,
)
from iobench.stats.estimates import Interval, median
from iobench.units import count_of, in_gib

SCHEMA = "iobench.compare/3"

_Control = tuple[str, Operation, str | None]  # name, operation, target
_SPOILT = (VerdictStatus.INVALID, VerdictStatus.FAILED)
_OPERATIONS: tuple[Operation, ...] = ("save", "restore")


@dataclass(frozen=True, kw_only=True)
class ComparisonRow(HasSetting):
    """One contender's saves or restores on both sides.

    `ratio` is the new rate over the old one. `ci95` is its interval: those of all rows hold
    together in 95% of all comparisons. `floor` is the part that counts as noise, by the A/A of
    `floor_record` where one is named; see docs/statistics.md. `finding` is None where a run's
    samples are INVALID or FAILED: such figures are not judged, nor are those that one run a side
    has, of several runs. `spoilt` is True where only the new samples are. `regression` is True
    where the finding is worse and the loss exceeds the threshold. A `control` is unchanged code: it
    shows how the storage changed, and is never a regression.
    """

    workload: str
    setting: Setting
    operation: Operation
    old_samples: int
    new_samples: int
    old_bytes_per_s: float
    new_bytes_per_s: float
    ratio: float
    ci95: Interval | None
    floor: float
    floor_record: str | None = field(default=None, metadata=IF_SET)
    finding: Finding | None
    regression: bool
    control: bool
    spoilt: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """The rows of all contenders that both sides have, and what else differs between the sides.

    `unlike` lists the differences between the runs. `missing` and `added` are the contenders that
    only the old or only the new runs have. `failed` are the contenders that have old samples but
    failed before their first new one, with the reason. `controls` are the ratios of contenders
    whose code is the same on both sides, including fio.
    """

    schema: str = SCHEMA
    workload: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    threshold: float
    unlike: tuple[str, ...]
    rows: tuple[ComparisonRow, ...]
    controls: Mapping[str, float]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    failed: Mapping[str, str]

    @property
    def one_run_a_side(self) -> bool:
        """Whether each side has one run, so that no spread between runs is known."""
        return len(self.old) == len(self.new) == 1

    @property
    def regressions(self) -> list[ComparisonRow]:
        return [row for row in self.rows if row.regression]

    @property
    def spoilt(self) -> list[str]:
        """The contenders that were VALID before and are INVALID or FAILED now."""
        rows = [f"{row.setting.name} {row.operation}" for row in self.rows if row.spoilt]
        return [*rows, *self.failed]


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The runs of one side: for each contender and operation, one list of samples per run."""

    results: Sequence[ResultFile]
    runs: dict[Figure, list[list[Sample]]] = field(default_factory=dict)
    verdicts: dict[Figure, Verdict] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Sequence[ResultFile]) -> _Side:
        side = cls(results=results)
        for result in results:
            context = Context.of(result.run)
            for key, samples in group(result).items():
                side.runs.setdefault(key, []).append(samples)
                verdict = verdict_of(samples, context)
                if key not in side.verdicts or verdict.status in _SPOILT:
                    side.verdicts[key] = verdict
        # Also a contender that failed in one of the runs before its first sample there.
        for failure in (failure for one in results for failure in one.failures):
            failed = Verdict(status=VerdictStatus.FAILED, reasons=(Reason(text=failure.why),))
            which = [key for key in side.runs if key[0] == contender_of(failure)]
            side.verdicts.update(dict.fromkeys(which, failed))
        return side

    @cached_property
    def recorded(self) -> RecordedFloor:
        """The floors by A/A records beside the first run."""
        return floors_beside(self.results[0])

    def names(self, keys: Iterable[Figure]) -> tuple[str, ...]:
        return tuple(_name(self.runs[key][0]) for key in keys)


def unlike_runs(old: Sequence[ResultFile], new: Sequence[ResultFile]) -> list[str]:
    """Return what differs between the first old run and each other one, in words, each once."""
    first, *others = (*old, *new)
    return list(dict.fromkeys(what for one in others for what in unlike(first.run, one.run)))


def compare(
    old: Sequence[ResultFile], new: Sequence[ResultFile], threshold: float
) -> RunComparison:
    """Compare every contender that both sides have. `threshold` is a part: 0.05 for 5%.

    With several runs on a side the spread between runs decides. With one run a side only the
    spread of samples is known, which is smaller than the spread between runs. Of comparisons of
    unchanged code with several runs a side, at most 5% have a regression, however many rows there
    are.
    """
    before, after = _Side.of(old), _Side.of(new)
    failures = {contender_of(failure): failure for one in new for failure in one.failures}
    kinds = {(operation, restore_as) for _, operation, restore_as in before.runs}
    tried = {*after.runs, *((contender, *kind) for contender in failures for kind in kinds)}
    pairs = _pairs(before.runs, tried)
    controls = dict(_controls(before, after))
    both = [(one, other) for one, other in pairs if other in after.runs]
    judged = sum(one != other or not _is_control(one, before, after) for one, other in both)
    rows = [
        _row(one, other, (before, after), controls, threshold, max(1, judged))
        for one, other in both
    ]
    rows.sort(key=lambda row: row.operation == "restore")
    matched = {one for one, _ in pairs}, {other for _, other in pairs}
    return RunComparison(
        workload=new[0].run.workload.name,
        old=tuple(str(one.path) for one in old),
        new=tuple(str(one.path) for one in new),
        threshold=threshold,
        unlike=tuple(unlike_runs(old, new)),
        rows=tuple(rows),
        controls={f"{name} {kind}": ratio for (name, kind, _), ratio in controls.items()},
        missing=before.names(key for key in before.runs if key not in matched[0]),
        added=after.names(key for key in after.runs if key not in matched[1]),
        failed={
            _name(before.runs[one][0]): failures[other[0]].why
            for one, other in pairs
            if other not in after.runs
        },
    )


def _controls(before: _Side, after: _Side) -> Iterator[tuple[_Control, float]]:
    """Yield how the rates of unchanged code changed: fio, and peers if all versions are the same.

    With one run a side each of them counts. With several runs, only a change beyond its own floor
    counts.
    """
    sides: dict[_Control, tuple[list[list[float]], list[list[float]]]] = {}
    for position, side in enumerate((before, after)):
        for one in side.results:
            for target, ceiling in find_ceilings(one).items():
                name = at_target("fio", target)
                for operation in _OPERATIONS:
                    both = sides.setdefault((name, operation, target), ([], []))
                    both[position].extend([rate] for rate in [ceiling.of(operation)] if rate)
    for key in before.runs.keys() & after.runs.keys():
        if _is_control(key, before, after):
            setting = before.runs[key][0][0].setting
            rates = _rates(before.runs[key]), _rates(after.runs[key])
            sides[setting.name, key[1], setting.axes.target] = rates
    for who, (old, new) in sorted(sides.items(), key=lambda one: one[0][:2]):
        if old and new:
            found = compare_runs(new, old)
            if len(old) == len(new) == 1 or found.finding is not Finding.NONE:
                yield who, found.ratio.ratio


def _is_control(key: Figure, before: _Side, after: _Side) -> bool:
    if not json.loads(key[0])["writer"].startswith(PREFIX) or key[2] is not None:
        return False
    if any(side.verdicts[key].status in _SPOILT for side in (before, after)):
        return False
    versions = [
        {**one.run.environment.machine.versions, "iobench": None}
        for one in (*before.results, *after.results)
    ]
    return all(one == versions[0] for one in versions)


def _rates(runs: Iterable[Iterable[Sample]]) -> list[list[float]]:
    return [list(rates_by_repetition(samples).values()) for samples in runs]


def _pairs(before: Collection[Figure], after: Collection[Figure]) -> list[tuple[Figure, Figure]]:
    """Pair equal settings. Then pair the last two of a writer if each side has one left."""
    left: dict[str, tuple[list[Figure], list[Figure]]] = {}
    for side, keys in enumerate((before, after)):
        for key in keys:
            if not (key in before and key in after):
                whose = json.loads(key[0]) | {"options": None}
                left.setdefault(json.dumps([whose, *key[1:]]), ([], []))[side].append(key)
    others = [(old[0], new[0]) for old, new in left.values() if len(old) == len(new) == 1]
    return [(key, key) for key in before if key in after] + others


def _name(samples: Sequence[Sample]) -> str:
    return f"{samples[0].setting.name} {samples[0].operation}"


def _row(
    one: Figure,
    other: Figure,
    sides: tuple[_Side, _Side],
    controls: Mapping[_Control, float],
    threshold: float,
    judged: int,
) -> ComparisonRow:
    """Return one row of `judged` rows, which share the error of one comparison."""
    before, after = sides
    old, new = before.runs[one], after.runs[other]
    first, last = old[0][0], new[0][0]
    verdicts = {"before": before.verdicts[one], "now": after.verdicts[other]}
    spoilt = {
        when: f"{verdict.status} {when}: {verdict.reasons[0]}"
        for when, verdict in verdicts.items()
        if verdict.status in _SPOILT
    }
    control = one == other and _is_control(one, before, after)
    moved = {
        name: ratio
        for (name, operation, target), ratio in controls.items()
        if (operation, target) == (one[1], last.axes.target) and not control
    }
    noise, one_a_side = _floor(old, new, after.recorded), len(old) == len(new) == 1
    found = compare_runs(_rates(new), _rates(old), noise.part, rows=judged)
    ratio = found.ratio
    difference = replace(found, floor=control_floor(found.floor, ratio.ratio, moved.values()))
    alone = one_a_side and max(len(before.results), len(after.results)) > 1
    few = []
    if alone:
        few.append("one run a side has it: the spread between runs is unknown")
    elif one_a_side and ratio.samples < LEAST_SAMPLES:
        few.append(
            f"{ratio.samples} repetitions cannot show a difference; --repeat {LEAST_SAMPLES}"
        )
    finding = None if spoilt or alone else difference.finding
    worse = finding is Finding.WORSE and ratio.ratio < 1 - threshold
    return ComparisonRow(
        workload=after.results[0].run.workload.name,
        setting=last.setting,
        operation=last.operation,
        old_samples=sum(map(len, old)),
        new_samples=sum(map(len, new)),
        old_bytes_per_s=_middle(old),
        new_bytes_per_s=_middle(new),
        ratio=ratio.ratio,
        ci95=ratio.interval,
        floor=difference.floor,
        floor_record=noise.record,
        finding=finding,
        regression=worse and not control,
        control=control,
        spoilt="now" in spoilt and "before" not in spoilt,
        notes=(
            *spoilt.values(),
            *changed_options(first.options, last.options),
            *few,
            *(["unchanged code, so this is what the storage did"] if control else []),
        ),
    )


def _floor(
    old: Sequence[Sequence[Sample]], new: Sequence[Sequence[Sample]], recorded: RecordedFloor
) -> Floor:
    """Return the floor of one run a side, by A/A; of more runs the spread between them decides."""
    if len(old) > 1 or len(new) > 1:
        return Floor()
    first = new[0][0]
    own = [floor for side in (*old, *new) if (floor := Floor.of(side)) is not None]
    if own:
        return max(own, key=lambda one: one.part)
    return recorded(kind_of(first), first.axes.target)


def changed_options(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return in words the options of a writer that differ."""
    names = dict.fromkeys([*old, *new])
    return [
        f"{name}: {_value(old, name)} before, {_value(new, name)} now"
        for name in names
        if name not in old or name not in new or old[name] != new[name]
    ]


def _value(options: Mapping[str, Any], name: str) -> str:
    return str(options[name]) if name in options else "no such option"


def _middle(runs: Sequence[Sequence[Sample]]) -> float:
    return median([median(rates(same)) for same in runs])


_MOST_NAMES = 4  # in a line of the answer
_STYLES = {"better": "green", "worse": "bold red"}


def compare_document(comparison: RunComparison, runs: Sequence[ResultFile] = ()) -> Document:
    """Return the document of a comparison of `runs`, the newest last; a page carries them."""
    last = [environment_section(runs[-1].run), repeat_section(*runs)] if runs else []
    return Document(
        kind="iobench compare",
        title=_title(comparison),
        about=(f"before: {', '.join(comparison.old)}", f"now: {', '.join(comparison.new)}"),
        answer=tuple(_answer(comparison)),
        tables=(_table(comparison),) if comparison.rows else (),
        notes=tuple(notes(comparison)),
        data=to_plain(comparison),
        rows="rows",
        appendix=tuple(last),
        records=tuple(one.path for one in runs),
    )


def _answer(comparison: RunComparison) -> Iterator[Line]:
    """Yield how many rows have each finding, and which are better or worse if they are few."""
    found: dict[str, list[str]] = {}
    for label, row in _labelled(comparison):
        finding = "not judged" if row.finding is None else str(row.finding)
        found.setdefault(finding, []).append(f"{label} {row.operation} {row.ratio:.2f}x")
    for finding, who in found.items():
        which = f": {', '.join(who)}" if finding in _STYLES and len(who) <= _MOST_NAMES else ""
        yield Line(finding.capitalize(), (f"{len(who)} of {len(comparison.rows)}{which}",))
    if comparison.failed:
        yield Line("Failed", (", ".join(comparison.failed),))


def _table(comparison: RunComparison) -> Grid:
    """Return the table of ratios. On a narrow terminal both rates go first, then the interval."""
    columns: tuple[Column[tuple[str, ComparisonRow]], ...] = (
        Column("writer", lambda row: row[0], figure=False),
        Column("operation", lambda row: row[1].operation, figure=False),
        Column("before\nGiB/s", lambda row: in_gib(row[1].old_bytes_per_s), 1),
        Column("now\nGiB/s", lambda row: in_gib(row[1].new_bytes_per_s), 2),
        Column("ratio", lambda row: f"{row[1].ratio:.3f}"),
        Column("95%\ninterval", lambda row: span(row[1].ci95, "{:.3f}".format), 3),
        Column("finding", lambda row: _finding(row[1]), figure=False),
    )
    styles = tuple(_STYLES.get(str(one.finding), "") for one in comparison.rows)
    return Grid.of(_labelled(comparison), columns, styles=styles)


def _finding(row: ComparisonRow) -> str:
    if row.finding is None:
        return "not judged"
    return f"{row.finding} (regression)" if row.regression else str(row.finding)


def _labelled(comparison: RunComparison) -> Iterator[tuple[str, ComparisonRow]]:
    return zip(labels(one.setting for one in comparison.rows), comparison.rows, strict=True)


def notes(comparison: RunComparison) -> Iterator[str]:
    """Yield by which floor runs are compared, and what is known of single rows."""
    if comparison.one_run_a_side:
        yield (
            "one run a side: two runs of unchanged code differ by more than their samples do; "
            "compare OLD1 OLD2 -- NEW1 NEW2 measures by how much"
        )
    for who, ratio in comparison.controls.items():
        yield f"unchanged code: {who} moved by {ratio:.3f}, the floor of what moved the same way"
    for what in comparison.unlike:
        yield f"unlike runs, compared by force: {what}"
    rows_by_note: dict[str, list[str]] = {}
    for label, one in _labelled(comparison):
        for note in one.notes:
            rows_by_note.setdefault(note, []).append(f"{label} {one.operation}")
    for note, rows in rows_by_note.items():
        yield note if len(rows) == len(comparison.rows) > 1 else f"{note} [{', '.join(rows)}]"
    for who, why in comparison.failed.items():
        yield f"FAILED now: {who}: {why}"
    if comparison.missing:
        yield f"only before: {', '.join(comparison.missing)}"
    if comparison.added:
        yield f"only now: {', '.join(comparison.added)}"
    floors = sorted({one.floor for one in comparison.rows})
    if floors:
        shown = " to ".join(f"{100 * floor:.1f}%" for floor in {floors[0]: 0, floors[-1]: 0})
        records = dict.fromkeys(one.floor_record for one in comparison.rows if one.floor_record)
        by = f" (A/A in {', '.join(records)})" if records else ""
        yield (
            f"a difference is shown when the whole interval is beyond {shown}{by}; "
            f"a regression is worse by more than {100 * comparison.threshold:g}%"
        )
    if len(comparison.rows) > 1:
        yield "the intervals of all rows hold together in 95% of comparisons (Bonferroni)"


def _title(comparison: RunComparison) -> str:
    """Return the workload and the number of regressions: `llama7b: 1 regression`."""
    count, spoilt = len(comparison.regressions), len(comparison.spoilt)
    found = count_of(count, "regression") if count else "no regression shown"
    return f"{comparison.workload}: {found}" + (
        f", {spoilt} INVALID or FAILED now" if spoilt else ""
    )
