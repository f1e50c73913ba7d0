"""The page of `iobench run` in a real browser, from a file, with the network cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.browser import OpenPage
from support.records import HOSTILE, hostile_record

from iobench.report.kinds import document_of
from iobench.results import read

_RESULTS = Path(__file__).parents[2] / "results"
_RECORD = _RESULTS / "reference-llama7b.jsonl"


def test_all_of_a_run(open_page: OpenPage, tmp_path: Path) -> None:
    """Charts with a mark per sample, a tooltip, the record to save, and paper."""
    result = read(_RECORD)
    opened = open_page(document_of([_RECORD]))
    for operation in ("save", "restore"):
        samples = sum(sample.operation == operation for sample in result.samples)
        assert opened.marks(f"rate-{operation}", "symbol") == samples
        assert opened.marks(f"in-order-{operation}", "symbol") == samples
    assert opened.count("figure svg") == opened.count("figure")
    said = [line.split("\t")[0] for line in opened.tooltip("rate-save")]
    assert said == ["writer", "repetition", "rate", "time", "verdict", "others meanwhile"]
    with opened.page.expect_download() as saving:
        opened.page.get_by_role("button", name=f"Download {_RECORD.name}").click()
    saved = tmp_path / "saved.jsonl"
    saving.value.save_as(saved)
    assert saved.read_bytes() == _RECORD.read_bytes()
    widths = "[...document.querySelectorAll('.chart svg')].map((one) => one.clientWidth)"
    before = opened.run(widths)
    assert opened.page.pdf().startswith(b"%PDF")
    assert opened.run(widths) == before  # drawn for the paper, and then for the screen again
    assert opened.problems == []


def test_charts_are_drawn_when_they_are_seen(open_page: OpenPage) -> None:
    """Those near the screen first, one where somebody scrolls to it, and all of them on paper."""
    page = document_of([_RECORD])
    opened = open_page(page, idle=False)
    last = opened.page.locator("figure .chart").last
    assert last.get_attribute("data-drawn") is None
    last.scroll_into_view_if_needed()
    opened.page.wait_for_selector(f'figure[data-chart="{[*page.charts][-1]}"] svg')
    drawn = opened.count("figure svg")
    assert 0 < drawn < len(page.charts)
    paper = len(opened.page.pdf())
    assert opened.count("figure svg") == len(page.charts)
    assert opened.count("html[data-drawn]") == 1
    assert paper == pytest.approx(len(open_page(page).page.pdf()), rel=0.02)
    assert opened.problems == []


def test_a_phone_in_the_dark(open_page: OpenPage) -> None:
    """Nothing is wider than the screen, and all text is light on dark, in charts too."""
    opened = open_page(document_of([_RECORD]), width=400, scheme="dark")
    assert opened.run("document.documentElement.scrollWidth") <= 400
    lightness = """[...document.querySelectorAll("h1, .chart text")].map((one) => {
        const style = getComputedStyle(one);
        const colour = one.tagName === "H1" ? style.color : style.fill;
        return colour.match(/[0-9]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0);
    })"""
    found = opened.run(lightness)
    assert len(found) > 20
    assert min(found) > 3 * 128
    ground = opened.run("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(18, 21, 26)"
    assert opened.problems == []


_CUT = """[...document.querySelectorAll("SELECTOR")]
    .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"""
_CUT_TEXTS = """[...document.querySelectorAll(".chart svg")].flatMap((svg) => {
    const end = svg.getBoundingClientRect().right + 1;
    const over = (one) => one.getBoundingClientRect().right > end;
    return [...svg.querySelectorAll("text")].filter(over).map((one) => one.textContent);
})"""


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_cut(open_page: OpenPage, width: int) -> None:
    """The legends of twelve writers, commands, and tables where the screen is wide enough."""
    opened = open_page(document_of([_RESULTS / "reference-peers-llama7b.jsonl"]), width=width)
    assert opened.run(_CUT_TEXTS) == []
    wide = "pre" if width == 400 else "pre, nav, .table"
    assert opened.run(_CUT.replace("SELECTOR", wide)) == []
    opened.page.get_by_role("link", name="Drift").click()
    place = opened.run("document.querySelector(location.hash).getBoundingClientRect().top")
    assert 0 < place < 100  # below the line of links, which stays


def test_two_records(open_page: OpenPage) -> None:
    """Side by side: a mark per sample of both."""
    saves = sum(sample.operation == "save" for sample in read(_RECORD).samples)
    opened = open_page(document_of([_RECORD, _RECORD]))
    assert opened.marks("rate-save", "symbol") == 2 * saves
    assert opened.count("button[data-file]") == 2
    assert opened.problems == []


def test_hostile_text_runs_nothing(open_page: OpenPage, tmp_path: Path) -> None:
    """Each text of the record is followed by texts that would set `hit`, or break the page. What
    got through would not run either: the page's own policy forbids it."""
    record = hostile_record(_RECORD, tmp_path / "hostile.jsonl", "".join(HOSTILE))
    page = document_of([record])
    opened = open_page(page)
    assert opened.run("typeof hit") == "undefined"
    assert opened.count("figure svg") == opened.count("figure") > 0
    (chart, *_) = page.charts
    assert all(text in "".join(opened.tooltip(chart)) for text in HOSTILE if text.isprintable())
    assert opened.run("typeof hit") == "undefined"
    assert opened.problems == []
    injected = (
        "document.body.append(Object.assign(document.createElement('script'), {text: 'hit = 1'}))"
    )
    opened.run(injected)
    assert opened.run("typeof hit") == "undefined"
    (problem,) = opened.problems
    assert "Content Security Policy" in problem
