"""The rows of a run: each summary with its samples, and each sample in words for its tooltip."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from iobench.bench.judging.verdict import Context, judge
from iobench.report.palette import colour_of, shape_of
from iobench.report.summary import Report, disturbances, summarise_with_samples
from iobench.report.winners import PROVED, RANKED, Summary
from iobench.results import Operation, ResultFile, Sample
from iobench.results.setting import at_target
from iobench.stats.comparison import rates
from iobench.stats.estimates import rate
from iobench.units import GIB, format_rate, format_seconds, format_size


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One row of a report with the samples that it summarises, saves with their verification."""

    summary: Summary
    samples: Sequence[Sample]
    context: Context

    @property
    def counts(self) -> bool:
        """Whether its figure counts: not INVALID, not FAILED."""
        return self.summary.verdict in RANKED

    @property
    def colour(self) -> str:
        return colour_of(self.summary.writer)

    @property
    def shape(self) -> str:
        return shape_of(self.summary.writer)

    @property
    def median(self) -> float:
        """GiB/s."""
        return in_gib_per_s(self.summary.median_bytes_per_s)

    @cached_property
    def rates(self) -> list[float]:
        """GiB/s of each sample."""
        return [in_gib_per_s(one) for one in rates(self.samples)]

    def words(self, sample: Sample) -> dict[str, str]:
        """Return what a tooltip says about `sample`, by heading."""
        verdict, seen = judge(sample, self.context), sample.interference
        bad = verdict.status not in PROVED
        return {
            "writer": self.summary.label,
            "repetition": str(sample.repetition + 1),
            "rate": format_rate(rate(sample.bytes, sample.elapsed_s)),
            "time": f"{format_seconds(sample.elapsed_s)} for {format_size(sample.bytes)}",
            "verdict": f"{verdict.status}: {verdict.reasons[0]}" if bad else str(verdict.status),
            "others meanwhile": ", ".join(disturbances(seen)) or "nothing seen"
            if seen
            else "not recorded",
        }


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rows that a chart compares: one operation, and one of several targets."""

    operation: Operation
    restore_as: str | None
    target: str | None
    rows: tuple[RunRow, ...]

    @property
    def name(self) -> str:
        """What is compared: `save`, `restore tp=8 on /mnt/a`."""
        on = f"on {self.target}" if self.target else None
        return " ".join(part for part in (self.operation, self.restore_as, on) if part)

    def label(self, row: RunRow) -> str:
        """Return the label of a row without what all rows here share: the target."""
        return row.summary.label.replace(at_target("", self.target), "")

    def slug(self, what: str) -> str:
        """Return the name of a chart of this group: `rate-restore-tp-8`."""
        return re.sub(r"[^a-z0-9]+", "-", f"{what} {self.name}".lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The report of a run and its rows, in the same order: all charts are made from them."""

    report: Report
    rows: tuple[RunRow, ...]
    started_at: str

    @classmethod
    def of(cls, result: ResultFile) -> Measured:
        report, samples = summarise_with_samples(result)
        context = Context.of(result.run)
        rows = (
            RunRow(summary=summary, samples=own, context=context)
            for summary, own in zip(report.summaries, samples, strict=True)
        )
        return cls(report=report, rows=tuple(rows), started_at=result.run.started_at)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The rows by operation, part that is restored, and target; in the order of the report."""
        found: dict[tuple[Operation, str | None, str | None], list[RunRow]] = {}
        for row in self.rows:
            axes = row.summary.axes
            kind = row.summary.operation, axes.restore_as, axes.target
            found.setdefault(kind, []).append(row)
        return tuple(
            Group(operation=operation, restore_as=restore_as, target=target, rows=tuple(rows))
            for (operation, restore_as, target), rows in found.items()
        )


def moment(text: str) -> str:
    """Return an ISO 8601 time as `2026-01-31 12:00 UTC`."""
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M %Z}"


def in_gib_per_s(bytes_per_s: float) -> float:
    return bytes_per_s / GIB
