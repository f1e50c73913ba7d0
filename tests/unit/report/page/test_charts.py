"""Each chart has what the record has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import altair as alt
import pytest

from iobench.bench.judging.ceiling import Ceiling
from iobench.environment import Storage
from iobench.report.charts.run import Group, Measured, in_order_chart, over_time_chart, rates_chart
from iobench.report.document import Chart, Document
from iobench.report.kinds import document_of
from iobench.report.page.html import html
from iobench.report.run import run_document
from iobench.results import Interference, ResultFile, Sample
from iobench.units import GIB

_OPERATIONS = ("save", "restore")
_KINDS = ("rate", "over-time", "in-order")
"""The chart of each section, for one operation."""


def _names(*absent: str) -> list[str]:
    """The names of all charts but some, in the order of the page."""
    return [
        f"{kind}-{operation}" for kind in _KINDS for operation in _OPERATIONS if kind not in absent
    ]


def _layers(chart: Chart, mark: str) -> Iterator[list[Mapping[str, Any]]]:
    """The data of each layer with this mark."""
    for layer in chart.spec["layer"]:
        if layer["mark"]["type"] == mark:
            data = layer.get("data", chart.spec.get("data"))  # shared by all layers, or its own
            yield chart.spec["datasets"][data["name"]]


def _group(measured: Measured, operation: str) -> Group:
    (group,) = (one for one in measured.groups if one.operation == operation)
    return group


def _rates(measured: Measured, fio_bytes_per_s: float | None) -> Chart:
    """The rates of the saves, with this ceiling."""
    report = replace(measured.report, ceiling=Ceiling(save_bytes_per_s=fio_bytes_per_s))
    return rates_chart(replace(measured, report=report), _group(measured, "save"))


def _with(result: ResultFile, change: Callable[[Sample], Sample]) -> Measured:
    return Measured.of(replace(result, samples=tuple(map(change, result.samples))))


@pytest.mark.slow
def test_the_specs_are_vega_lite(page: Document) -> None:
    """Altair's schema accepts each of them, and each has the width of its container."""
    assert [*page.charts] == _names()
    for chart in page.charts.values():
        alt.LayerChart.from_dict({**chart.spec, "config": {}})
        assert chart.spec["width"] == "container"
        assert chart.alt.endswith(".")
        assert chart.numbers is not None


@pytest.mark.parametrize("operation", _OPERATIONS)
def test_a_dot_is_a_sample(recorded: ResultFile, page: Document, operation: str) -> None:
    """In GiB/s, of the whole operation."""
    rates = sorted(
        s.bytes / s.elapsed_s / GIB for s in recorded.samples if s.operation == operation
    )
    for name, field in ((f"rate-{operation}", "x"), (f"in-order-{operation}", "y")):
        (dots,) = _layers(page.charts[name], "point")
        assert sorted(dot[field] for dot in dots) == pytest.approx(rates)


def test_rates_are_those_of_the_report(measured: Measured) -> None:
    """Median, interval and order, and the ceiling where there is one."""
    group = _group(measured, "save")
    chart = _rates(measured, 3 * GIB)
    (bars,), (ticks,) = _layers(chart, "bar"), _layers(chart, "tick")
    assert [tick["x"] * GIB for tick in ticks] == [
        pytest.approx(row.summary.median_bytes_per_s) for row in group.rows
    ]
    assert [bar["x2"] * GIB for bar in bars] == [
        pytest.approx((row.summary.ci95_bytes_per_s or (0, 0))[1]) for row in group.rows
    ]
    (line,) = _layers(chart, "rule")
    assert [part["x"] for part in line] == [3] * len(group.rows)
    assert "Dashed line: fio 3.00." in chart.alt
    assert not list(_layers(_rates(measured, None), "rule"))


def test_what_does_not_count_is_hollow_and_widens_no_axis(recorded: ResultFile) -> None:
    """A writer that stores nothing is a hundred times faster."""
    fast = recorded.samples[0].writer

    def change(one: Sample) -> Sample:
        if one.writer != fast:
            return one
        return replace(one, stores=False, elapsed_s=one.elapsed_s / 100)

    measured = _with(recorded, change)
    chart = _rates(measured, None)
    (dots,) = _layers(chart, "point")
    assert {dot["fill"] == "transparent" for dot in dots if dot["word0"] == fast} == {True}
    assert {dot["fill"] == "transparent" for dot in dots if dot["word0"] != fast} == {False}
    most = chart.spec["layer"][0]["encoding"]["x"]["scale"]["domain"][1]
    assert most < min(dot["x"] for dot in dots if dot["word0"] == fast)
    assert {dot["shape"] for dot in dots if dot["word0"] == fast} == {"triangle-right"}
    assert "Hollow dots do not count. Triangles are beyond the axis." in chart.caption


def test_the_tooltip_of_a_sample(recorded: ResultFile) -> None:
    """Repetition and verdict, and what others did meanwhile."""
    seen = Interference(
        steal_s=0.25, memory_stall_s=None, foreign_read_bytes=0, foreign_write_bytes=2**30
    )
    measured = _with(recorded, lambda one: replace(one, interference=seen))
    (first, *_) = measured.rows
    words = first.words(first.samples[0])
    assert words["others meanwhile"] == "250 ms of CPU stolen, 1.00 GiB written by others"
    assert words["repetition"] == str(first.samples[0].repetition + 1)
    assert words["verdict"].startswith("VALID")
    lost = replace(first.samples[0], bytes=1)
    assert "moved another number of bytes" in first.words(lost)["verdict"]


def test_bytes_over_time_are_all_of_them(measured: Measured) -> None:
    """The steps of a line hold the bytes that its counter saw in the median sample."""
    group = _group(measured, "save")
    chart = over_time_chart(group)
    assert chart is not None
    (points,) = _layers(chart, "line")
    for row in group.rows:
        rates = {abs(rate - row.median): at for at, rate in enumerate(row.rates)}
        series = row.samples[rates[min(rates)]].series
        assert series is not None
        for dashed, counted in ((False, series.completed), (True, series.counted)):
            line = [p for p in points if (p["label"], p["dashed"]) == (row.summary.label, dashed)]
            moved = sum(a["y"] * (b["x"] - a["x"]) for a, b in pairwise(line)) * GIB
            assert counted is not None
            assert moved == pytest.approx(sum(counted), rel=1e-3)


def test_old_records_have_no_series(old: ResultFile) -> None:
    """Then there is no such chart, and the page has all others."""
    assert over_time_chart(_group(Measured.of(old), "save")) is None
    assert [*run_document(old).charts] == _names("over-time")


def test_the_order_of_one_sample_each_is_no_chart(recorded: ResultFile) -> None:
    """The time of others begins at zero, so that a late sample is late."""
    first = tuple(one for one in recorded.samples if one.repetition == 0)
    group = _group(Measured.of(replace(recorded, samples=first)), "restore")
    assert in_order_chart(recorded.run.started_at, group) is None
    chart = in_order_chart(recorded.run.started_at, _group(Measured.of(recorded), "restore"))
    assert chart is not None
    assert chart.spec["layer"][0]["encoding"]["x"]["scale"]["zero"] is True


def test_a_run_that_measured_nothing(recorded: ResultFile) -> None:
    """Or one sample, which has no interval: the page has what there is."""
    end = replace(recorded, samples=(), ceiling=(), end=None)
    page = run_document(end)
    assert not page.charts
    assert page.notes[0] == "nothing was measured"
    assert html(page)
    one = run_document(replace(end, samples=recorded.samples[:1]))
    chart = one.charts[f"rate-{recorded.samples[0].operation}"]
    assert not list(_layers(chart, "bar"))
    assert [len(dots) for dots in _layers(chart, "point")] == [1]
    assert [line.subject for line in one.answer if line.caveat] == ["Stopped"]


def test_several_targets_have_charts_of_their_own(recorded: ResultFile) -> None:
    """Without the target in their labels; names that would be equal get a number."""
    environment = replace(
        recorded.run.environment,
        storages={target: Storage(fs_type="ext4") for target in ("/a", "/a-")},
    )

    def at(one: Sample, target: str) -> Sample:
        return replace(one, setting=one.setting.at(target=target))

    result = replace(
        recorded,
        run=replace(recorded.run, environment=environment),
        ceiling=(),
        samples=(
            *(at(one, "/a") for one in recorded.samples),
            *(replace(at(one, "/a-"), elapsed_s=2 * one.elapsed_s) for one in recorded.samples),
        ),
    )
    page = run_document(result)
    ends = [
        page.charts[name].spec["layer"][0]["encoding"]["x"]["scale"]["domain"][1]
        for name in ("rate-save-on-a", "rate-save-on-a-2")
    ]
    assert ends[0] == ends[1]  # the same axis: they are compared
    chart = page.charts["rate-save-on-a"]
    assert chart.title == "Rate of each save on /a"
    labels = [label["label"] for label in next(_layers(chart, "text"))]
    assert labels
    assert not any("target=" in label for label in labels)


def test_several_records(recorded: ResultFile, example: ResultFile) -> None:
    """The answer of each, then the sections of each; all records are attached."""
    each = [document_of([one.path]) for one in (recorded, example)]
    page = document_of([recorded.path, example.path])
    names = ["1: reference-llama7b", "2: example"]
    assert [line.subject for line in page.answer if not line.caveat] == names
    for name, one, line in zip(names, each, page.answer, strict=False):
        assert f"{name}: {one.title}" in page.about
        assert f"{one.answer[0].subject}: {one.answer[0].texts[0]}" in line.texts
    assert page.records == (recorded.path, example.path)
    assert [section.heading for section in page.sections] == names
    tables = [
        grid.rows
        for section in page.sections
        for part in section.sections
        for grid in part.grids
        if part.heading == "Figures"
    ]
    assert tables == [grid.rows for one in each for grid in one.tables]
    assert "rate-save-2" in page.charts
