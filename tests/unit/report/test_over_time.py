"""Saves that follow each other in the answer, the notes, the document and the chart."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest

from iobench.report.answer import answer
from iobench.report.render import render
from iobench.report.run import report_document, run_document
from iobench.report.summary import summarise
from iobench.results import ResultFile, Sample, read, to_plain

_RECORD = Path(__file__).parents[3] / "results" / "reference-burst-llama7b.jsonl"


@pytest.fixture(scope="module")
def burst() -> ResultFile:
    """10 minutes on a device of 40 MiB/s, and of 10 MiB/s after 30 s."""
    return read(_RECORD)


def said(result: ResultFile) -> dict[str, tuple[str, ...]]:
    return {line.subject: line.texts for line in answer(summarise(result))}


def saves(result: ResultFile) -> list[Sample]:
    return [one for one in result.samples if one.operation == "save"]


def test_both_rates_of_a_device_with_burst_credits(burst: ResultFile) -> None:
    """They are within 5% of the limits, and the time of the change is between the times given."""
    over_time = summarise(burst).summaries[0].over_time
    assert over_time is not None
    change = over_time.change
    assert change is not None
    assert change.before_bytes_per_s == pytest.approx(40 << 20, rel=0.05)
    assert change.after_bytes_per_s == pytest.approx(10 << 20, rel=0.05)
    assert change.at_s_ci95[0] < 30 < change.at_s_ci95[1]


def test_the_answer_has_the_rates_before_and_after(burst: ResultFile) -> None:
    assert said(burst)["Over time"] == (
        "odirect: 38.95 MiB/s (40.84 MB/s) for 28.5 s, then 9.99 MiB/s (10.47 MB/s)",
        "the change is between 24.1 s and 38 s, after 1.01 GiB",
        "steady in the last 5 rounds of 60 s (range 1%, drift 1%); saves took 99% of 10 min 5 s",
    )
    assert "Noise" not in said(burst)


def test_without_a_change_the_answer_says_so(burst: ResultFile) -> None:
    """The saves after the change have none."""
    late = tuple(s for s in burst.samples if s.repetition > 8 or s.operation == "restore")
    lines = said(replace(burst, samples=late))["Over time"]
    assert lines[0].startswith("odirect: no change seen in 9 min ")
    assert lines[0].endswith(", 9.99 MiB/s (10.47 MB/s)")


def test_too_few_rounds_are_not_called_steady(burst: ResultFile) -> None:
    early = tuple(one for one in burst.samples if one.repetition < 8)
    lines = said(replace(burst, samples=early))["Over time"]
    assert lines[-1].startswith("not known to be steady: 0 of 5 rounds of 60 s; saves took 95% of")


def test_others_have_no_such_lines(burst: ResultFile, example: ResultFile) -> None:
    """A run of repetitions, and saves that have lost a byte: their figure does not count."""
    assert "Over time" not in said(example)
    assert all("over_time" not in one for one in to_plain(summarise(example))["summaries"])
    short = tuple(replace(one, bytes=one.bytes - 1) for one in burst.samples)
    assert "Over time" not in said(replace(burst, samples=short))


def test_a_rate_that_moves_until_the_end_asks_for_more_time(burst: ResultFile) -> None:
    """The rounds decide, not the last five saves."""
    moving = tuple(
        replace(one, elapsed_s=one.elapsed_s / 2, phases_s={}) if one.repetition > 40 else one
        for one in burst.samples
    )
    lines = said(replace(burst, samples=moving))
    assert lines["Over time"][-1].startswith("not steady in the last 5 rounds of 60 s (range ")
    assert lines["Noise"] == (
        "1 of 2 series is not steady: let the storage rest, or find the rate that lasts by a "
        "longer --duration",
    )


def test_the_document_and_markdown_have_the_change(burst: ResultFile) -> None:
    report, stream = summarise(burst), StringIO()
    render(report_document(report), "json", stream)
    save, restore = json.loads(stream.getvalue())["summaries"]
    assert save["over_time"]["change"]["written_bytes"] == 7 * saves(burst)[0].bytes
    low, high = save["over_time"]["change"]["at_s_ci95"]
    assert low < save["over_time"]["change"]["at_s"] < high
    assert "over_time" not in restore
    markdown = StringIO()
    render(report_document(report), "md", markdown)
    assert "then 9.99 MiB/s (10.47 MB/s)" in markdown.getvalue()


def test_the_chart_has_the_rates_before_and_after(burst: ResultFile) -> None:
    """Three lines: the first rate, the step, the last rate."""
    charts = run_document(burst).charts
    chart = charts["in-order-save"]
    (lines,) = (one for one in chart.spec["layer"] if one["mark"]["type"] == "line")
    points = chart.spec["datasets"][lines["data"]["name"]]
    steps = [one for one in points if one["dashed"]]
    ends = [round(after["x"] - before["x"], 2) for before, after in pairwise(steps)]
    assert ends == [0.47, 0.0, 9.61]
    assert [round(one["y"], 3) for one in steps] == [0.038, 0.038, 0.01, 0.01]
    assert "Dashed" in chart.caption
    assert "in-order-restore" not in charts  # one sample
