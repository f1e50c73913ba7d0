"""Pages of train, compare, reproduce, plan and ranks: what is drawn is what was recorded."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import altair as alt
import pytest
from support.charts import values
from support.cli import app
from typer.testing import CliRunner

from iobench.claims.claims import study
from iobench.claims.reproduction import judge_records
from iobench.cli.pages import Shown
from iobench.errors import UsageError
from iobench.goodput.forecast import Forecast, forecast
from iobench.goodput.goodput import TrainingJob
from iobench.goodput.measured import by_hand
from iobench.report.claims import claims_document
from iobench.report.compare import compare, compare_document
from iobench.report.document import Document
from iobench.report.kinds import document_of
from iobench.report.page.html import html
from iobench.report.plan import plan_document
from iobench.report.run import run_document
from iobench.report.train import train_document
from iobench.results import ResultFile, WorldFacts, read

_RESULTS = Path(__file__).parents[4] / "results"


def reference(name: str) -> ResultFile:
    return read(_RESULTS / f"reference-{name}.jsonl")


def check(page: Document) -> str:
    """Return the page as HTML; its charts have words and numbers."""
    assert page.charts
    for chart in page.charts.values():
        alt.LayerChart.from_dict(
            {**chart.spec, "config": {}, "datasets": {}}
        )  # checked by altair's schema
        assert chart.title
        assert chart.alt.endswith(".")
        assert chart.numbers is not None
        assert chart.numbers.rows
    return html(page)


def test_training() -> None:
    """A dot per checkpoint."""
    result = reference("train-busy-gpt5b-nemo")
    page = document_of([result.path])
    saves = [save for block in result.training for save in block.saves]
    assert len(values(page.charts["stall"], "point")) == len(saves)
    assert check(page).count("data-chart=") == len(page.charts)


def test_comparison() -> None:
    """A row for each contender; all records are attached."""
    old, new = [reference("llama7b")], [reference("aa-llama7b")]
    comparison = compare(old, new, 0.05)
    page = compare_document(comparison, [*old, *new])
    ratios = [
        row[[one.name for one in page.tables[0].columns].index("ratio")]
        for row in page.tables[0].rows
    ]
    assert ratios == [f"{row.ratio:.3f}" for row in comparison.rows]
    counts = [int(line.texts[0].split()[0]) for line in page.answer]
    assert sum(counts) == len(comparison.rows)
    assert page.records == tuple(one.path for one in (*old, *new))
    assert not page.charts
    assert ratios[0] in html(page)


def test_claims() -> None:
    """A row for each claim, and each in the answer."""
    names = [f"hybrid-io{kind}-llama7b" for kind in ("", "-train")]
    records = [reference(name) for name in names]
    about = study("hybrid-io")
    found = judge_records(about, records)
    page = claims_document(about, records, found)
    assert [row[1] for row in page.tables[0].rows] == [one.claim.text for one in found]
    assert sum(len(line.texts) for line in page.answer) == len(found)
    assert found[0].claim.text in html(page)


def forecasts(nodes: list[int]) -> list[Forecast]:
    candidates = by_hand(save_s=30.0, blocking_s=2.0, restore_s=60.0)
    jobs = [TrainingJob(nodes=count) for count in nodes]
    return [one for job in jobs for one in forecast(candidates, candidates[0], job)]


def test_plan() -> None:
    """The answer and a row for each way to save; of several sizes the smallest and the largest."""
    page = plan_document(forecasts([2048]), title="by hand")
    assert page.answer[0].texts[0].startswith("Save every")
    assert f"{forecasts([2048])[1].best.ettr:.4f}" in html(page)
    several = plan_document(forecasts([64, 512, 2048]), title="by hand")
    assert [line.subject for line in several.answer] == ["Smallest job", "Largest job"]


def test_ranks() -> None:
    """First and last in the table of figures; the slowest rank and stragglers in the notes."""
    result = reference("numjobs-llama7b-zero3")
    four = [one for one in result.samples if one.axes.numjobs == 4]
    samples = [
        replace(one, jobs_done_s=(1.0, 1.0, 1.0, 2.0), jobs_bytes=(one.bytes // 4,) * 4)
        for one in four
    ]
    world = WorldFacts(
        launcher="torchrun",
        size=4,
        nodes=2,
        hosts=("a", "a", "b", "b"),
        node=(0, 0, 1, 1),
        interface="eth0",
        restored_from=(2, 3, 0, 1),
        clock_offset_s=(0.0,) * 4,
        clock_error_s=(0.0,) * 4,
    )
    page = run_document(
        replace(result, run=replace(result.run, world=world), samples=tuple(samples))
    )
    grids = [grid for section in page.sections for grid in section.grids]
    figures = next(grid for grid in grids if "last\ndone (s)" in {one.name for one in grid.columns})
    assert len(figures.rows) == len({(str(one.setting), one.operation) for one in samples})
    saves = len({one.repetition for one in samples})
    notes = [cell for grid in grids for row in grid.rows for cell in row]
    late = f"rank 3 in {saves} of {saves}, up to 2.00x the median"
    assert [one for one in notes if one.startswith("stragglers of ") and late in one]
    assert [one for one in notes if "(rank 3, host b) to " in one]
    check(page)


def test_the_page_of_the_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """--format html prints it, but not on a terminal."""
    old, new = (str(reference(name).path) for name in ("llama7b", "aa-llama7b"))
    plan = ["plan", "--nodes", "64", "--save", "30s", "--restore", "1min"]
    claims = ["reproduce", "checkfreq", "--results"]
    for verb in (
        ["compare", old, new, "--force"],
        plan,
        [*claims, str(_RESULTS / "reference-checkfreq-gpt5b-nemo.jsonl")],
    ):
        answer = CliRunner().invoke(app, [*verb, "--format", "html"])
        assert answer.exit_code == 0, answer.exception
        assert answer.stdout.startswith("<!doctype html>")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(UsageError, match="is a file; add"):
        Shown(form="html")


def test_a_training_that_was_killed_says_so() -> None:
    result = replace(reference("train-busy-gpt5b-nemo"), end=None)
    (line,) = [one for one in train_document(result).answer if one.caveat]
    assert "the run was killed or is still running" in line.texts[0]


def test_records_of_several_kinds_make_one_page() -> None:
    paths = [reference(name).path for name in ("train-busy-gpt5b-nemo", "llama7b")]
    page = document_of([*paths, _RESULTS / "reference-autotune-llama7b.jsonl"])
    assert [line.texts[0].split(":")[0] for line in page.answer if not line.caveat] == [
        "Overhead",
        "Save",
        "Chosen",
    ]
    assert {"stall", "rate-save"} <= page.charts.keys()
    check(page)


def test_only_a_run_has_a_seed_to_repeat_it() -> None:
    """`iobench train` and `iobench reproduce` take no --seed."""
    expected = {"llama7b": True, "train-gpt5b-nemo": False, "hybrid-io-llama7b": False}
    for name, has in expected.items():
        sections = document_of([reference(name).path]).appendix
        (repeat,) = [one for one in sections if one.heading == "Repeat it"]
        assert any(" --seed " in one for one in repeat.commands) == has
