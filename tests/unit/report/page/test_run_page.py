"""The page of a run: everything in it comes from the record."""

from __future__ import annotations

from iobench.report.page.html import html
from iobench.report.page.run_page import run_page
from iobench.results import ResultFile


def test_the_page_has_the_answer_and_a_dot_per_sample(example: ResultFile) -> None:
    page = run_page([example])
    names = list(page.charts)
    assert names[:2] == ["rate-save", "rate-restore"]
    dots = [
        layer
        for layer in next(iter(page.charts.values())).spec["layer"]
        if layer["mark"]["type"] == "point"
    ]
    saves = [sample for sample in example.samples if sample.operation == "save"]
    assert len(next(iter(page.charts.values())).spec["datasets"][dots[0]["data"]["name"]]) == len(
        saves
    )
    text = html(page)
    for line in page.answer:
        assert line.subject in text
