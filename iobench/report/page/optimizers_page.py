"""The page of optimizers side by side: steps, memory, bytes and checkpoints of each."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from iobench.bench.judging.stats import bounds, median, median_interval
from iobench.claims.claims import OFFLOAD_CLAIMS, Answer
from iobench.claims.offloaded import OFFLOAD_SOURCE, OffloadFinding
from iobench.errors import UsageError
from iobench.report.answer import Line
from iobench.report.grid import Grid
from iobench.report.optimizers import claims_grid, heading, notes, optimizer_grids
from iobench.report.page.charts.spread import Dot, Spread, spread_spec
from iobench.report.page.environment import facts_section
from iobench.report.page.page import Attachment, Chart, Page, Section
from iobench.report.page.rows import moment
from iobench.report.page.tables import charts_section, spread_words, tables_section
from iobench.train.optimizer_record import OptimizerRecord
from iobench.units import GIB, count_of, format_seconds, format_size

__all__ = ["offload_claims_page", "optimizers_page"]

_COLOURS = {"offload": "#2f9a4b", "resident": "#1f6dc0", "mmap": "#d5622a"}
_WORDS = ("repetition", "figure")


class _Series(NamedTuple):
    """The samples of one row of a chart, in the order of the repetitions."""

    label: str
    optimizer: str
    values: Sequence[float]


def optimizers_page(records: Sequence[tuple[Path, OptimizerRecord]]) -> Page:
    """Return the page of one record. Raises UsageError for several."""
    if len(records) > 1:
        raise UsageError("one report shows one record of optimizers; give them one by one")
    ((path, record),) = records
    return _page("iobench train --optimizer", heading(record), path, record)


def offload_claims_page(
    path: Path, record: OptimizerRecord, findings: Sequence[OffloadFinding]
) -> Page:
    """Return the page of the claims, with the record that decided them."""
    title = f"{OFFLOAD_CLAIMS}: {OFFLOAD_SOURCE}"
    return _page("iobench reproduce", title, path, record, findings)


def _page(
    kind: str,
    title: str,
    path: Path,
    record: OptimizerRecord,
    findings: Sequence[OffloadFinding] = (),
) -> Page:
    grids = [*([claims_grid(findings)] if findings else []), *optimizer_grids(record)]
    return Page(
        kind=kind,
        title=title,
        about=(heading(record), f"measured {moment(record.started_at)}"),
        answer=tuple(_answer(findings)),
        caveats=tuple(_caveats(record)),
        sections=(
            *charts_section("Training", _training_charts(record)),
            *charts_section("Checkpoints", _checkpoint_charts(record)),
            tables_section(grids, notes(record.optimizers)),
            facts_section(
                record.environment, f"{record.started_at}, run {record.run_id}", record.target
            ),
            Section(heading="Repeat it", commands=(shlex.join(record.command),)),
        ),
        attachments=(Attachment.of(path),),
    )


def _answer(findings: Sequence[OffloadFinding]) -> Iterator[Line]:
    for answer in Answer:
        which = [
            f"{one.text}: {one.ours} ({one.reason})" for one in findings if one.answer is answer
        ]
        if which:
            yield Line(f"{answer.value}: {count_of(len(which), 'claim')}", tuple(which))


def _caveats(record: OptimizerRecord) -> Iterator[Line]:
    wrong = [one.name for one in record.optimizers if not one.losses_equal]
    if wrong:
        yield Line("Losses differ", tuple(wrong))


def _training_charts(record: OptimizerRecord) -> Iterator[Chart]:
    found = record.optimizers
    steps = [_Series(one.name, one.name, one.step_s) for one in found]
    yield _chart("step", "Time of a step", steps, "s", 1.0, format_seconds)
    memory = [_Series(one.name, one.name, [one.memory_bytes]) for one in found]
    title = "Memory that the optimizer takes"
    yield _chart("memory", title, memory, "GiB", GIB, format_size)
    written = [
        *(_Series(f"{one.name}, a step", one.name, one.written_bytes_per_step) for one in found),
        *_checkpoints(record, "written_bytes", ", a checkpoint"),
    ]
    yield _chart("written", "Bytes that are written", written, "GiB", GIB, format_size)


def _checkpoint_charts(record: OptimizerRecord) -> Iterator[Chart]:
    stalls = list(_checkpoints(record, "stall_s"))
    yield _chart("stall", "How long a checkpoint stops training", stalls, "s", 1.0, format_seconds)
    durable = list(_checkpoints(record, "durable_s"))
    yield _chart("durable", "Until a checkpoint is durable", durable, "s", 1.0, format_seconds)
    restores = [
        _Series(
            f"{one.name} {method}",
            one.name,
            [each.elapsed_s for each in one.restores if each.method == method],
        )
        for one in record.optimizers
        for method in dict.fromkeys(each.method for each in one.restores)
    ]
    title = "Restore, until training can go on"
    yield _chart("restore", title, restores, "s", 1.0, format_seconds)


def _checkpoints(record: OptimizerRecord, name: str, suffix: str = "") -> Iterator[_Series]:
    for one in record.optimizers:
        for method in dict.fromkeys(each.method for each in one.checkpoints):
            values = [getattr(each, name) for each in one.checkpoints if each.method == method]
            yield _Series(f"{one.name} {method}{suffix}", one.name, values)


def _chart(
    name: str,
    title: str,
    series: Sequence[_Series],
    unit: str,
    unit_size: float,
    shown: Callable[[float], str],
) -> Chart:
    """`unit_size`: of a unit of the axis, in that of the values. Rows have the least first."""
    rows = [_row(one, unit_size, shown) for one in series]
    rows.sort(key=lambda row: row.middle or 0.0)
    axis, spoken = f"{title.lower()}, {unit}", "; ".join(f"{r.label} {r.figure}" for r in rows)
    several = any(len(one.values) > 1 for one in series)
    return Chart(
        name=name,
        title=title,
        alt=f"{title}, the least first: {spoken}.",
        caption=f"One dot per repetition; {spread_words(len(one.values) for one in series)}"
        if several
        else "",
        spec=spread_spec(rows, axis=axis, words=_WORDS, zero=True),
        numbers=Grid(
            columns=(("row", False), (f"median, {unit}", True), ("samples", False)),
            rows=[
                [row.label, f"{row.middle:.4g}", " ".join(f"{dot.x:.4g}" for dot in row.dots)]
                for row in rows
            ],
        ),
    )


def _row(one: _Series, unit_size: float, shown: Callable[[float], str]) -> Spread:
    held = bounds(median_interval(one.values))
    return Spread(
        label=one.label,
        figure=shown(median(one.values)),
        colour=_COLOURS[one.optimizer],
        middle=median(one.values) / unit_size,
        bounds=(held[0] / unit_size, held[1] / unit_size) if held else None,
        dots=[
            Dot(
                x=value / unit_size,
                words=dict(zip(_WORDS, (str(number + 1), shown(value)), strict=True)),
            )
            for number, value in enumerate(one.values)
        ],
    )
