"""The chart of snapshots in memory: when they come, when they go, and the stalls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import altair as alt
from support.charts import values

from iobench.claims.claims import study
from iobench.report.page.charts.memory_fill import fill_of, memory_fill_chart
from iobench.report.page.charts.timeline import Timeline
from iobench.report.page.reproduce_page import reproduce_page
from iobench.results import ResultFile, TrainBlock, TrainSave, read

_RECORD = Path(__file__).parents[4] / "results" / "reference-train-busy-gpt5b-nemo.jsonl"


def _save(step: int, stall_s: float, durable_s: float | None) -> TrainSave:
    return TrainSave(
        step=step, status="committed", stall_s=stall_s, persist_s=1.0, durable_s=durable_s
    )


def _record(*saves: TrainSave) -> tuple[ResultFile, TrainBlock]:
    """Three steps of a second each, with these saves."""
    found = read(_RECORD)
    block = next(one for one in found.training if one.saves)
    block = replace(block, step_s=(1.0,) * 3, persisting=(False, True, True), saves=saves)
    return replace(found, training=(block,)), block


def test_snapshots_come_after_their_stall_and_go_when_they_are_durable() -> None:
    """The second one waits for its turn: both are in memory for a while."""
    record, block = _record(_save(1, 0.5, 2.0), _save(2, 0.25, 2.25))
    timeline = Timeline(label="hybrid spill=2", colour="#000000", block=block)
    # Called at 1.0 s and, after the stall and a step, at 2.5 s.
    assert fill_of(timeline) == [(0.0, 0), (1.5, 1), (2.75, 2), (3.0, 1), (4.75, 0)]
    chart = memory_fill_chart([timeline])
    assert chart is not None
    alt.LayerChart.from_dict({**chart.spec, "config": {}, "datasets": {}})
    stalls = [(row["x"], row["x2"], row["y"]) for row in values(chart, "rule")]
    assert stalls == [(1.0, 1.5, 1), (2.5, 2.75, 2)]
    persists = [(row["x"], row["x2"]) for row in timeline.saves() if row["kind"] == "persist"]
    assert persists == [(2.0, 3.0), (3.75, 4.75)]
    page = reproduce_page(study("sk-hynix-memory"), [record], [])
    assert "memory-fill" in page.charts


def test_records_without_the_times_have_no_such_chart() -> None:
    _, block = _record(_save(1, 0.5, None))
    assert memory_fill_chart([Timeline(label="a", colour="#000000", block=block)]) is None
