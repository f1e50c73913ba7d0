"""The file of a page: whole, its own, and safe with texts that others wrote."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.records import HOSTILE, hostile_record

from iobench.errors import ResultFileError
from iobench.report.document import Document, Line, Section
from iobench.report.grid import Column, Grid, words
from iobench.report.kinds import document_of
from iobench.report.page.html import draw, html, inline_script, runtime
from iobench.report.run import run_document
from iobench.results import ResultFile

_MOST_BYTES = 2 * 2**20


_LIBRARY = "Vega"


class _Elements(HTMLParser):
    """The elements of a page with their attributes, the scripts, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: Counter[tuple[str, ...]] = Counter()
        self.scripts: list[str] = []
        self.text = ""
        self._within = ""
        self.feed(text.replace(runtime(), _LIBRARY))  # a megabyte

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found[tag, *(name for name, _ in attrs)] += 1
        self._within = tag
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self._within == "script":
            self.scripts[-1] += data
        else:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._within = ""


@pytest.fixture(scope="module")
def text(page: Document) -> str:
    return html(page)


@pytest.fixture(scope="module")
def harmless(example: ResultFile) -> _Elements:
    return _Elements(html(run_document(example)))


def test_the_answer_is_first_and_as_the_terminal_has_it(page: Document, text: str) -> None:
    shown = _Elements(text).text
    lines = [one for line in page.answer for one in line.texts]
    assert lines
    assert all(line in shown for line in lines)
    assert max(shown.index(line) for line in lines) < shown.index("Rate of each save")


def test_nothing_comes_from_elsewhere(text: str) -> None:
    """No element loads anything, and the policy allows the two scripts of the page alone."""
    found = _Elements(text)
    names = {name for key in found.found for name in key[1:]}
    assert not names & {"src", "srcset", "action", "data", "poster"}
    links = re.findall(r'href="([^"]*)"', text.replace(runtime(), ""))
    assert all(re.fullmatch(r"#part-\d+", one) for one in links)
    assert len(links) == found.found["a", "href"] > 3
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy.partition("script-src")[2].partition(";")[0]
    hashes = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in (runtime(), found.scripts[-1])
    ]
    assert all(f"'sha256-{one}'" in policy for one in hashes)
    assert found.scripts[-2] == _LIBRARY


def test_the_record_is_in_the_page(
    recorded: ResultFile, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (packed,) = re.findall(r'<script type="application/octet-stream"[^>]*>([^<]*)<', text)
    assert gzip.decompress(base64.b64decode(packed)) == recorded.path.read_bytes()
    monkeypatch.setattr("gzip.time.time", lambda: 0.0)
    assert html(run_document(recorded)) == text  # the same record, the same file


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_change_no_element(
    example: ResultFile, harmless: _Elements, tmp_path: Path, hostile: str
) -> None:
    """The page has the elements and attributes of the harmless one; the scripts are the same."""
    record = hostile_record(example.path, tmp_path / "hostile.jsonl", hostile)
    found = _Elements(html(document_of([record])))
    # The hostile names of writers are all unknown, so that only the order of rows may differ.
    assert {*found.found} == {*harmless.found}
    assert found.found["script", "type"] == harmless.found["script", "type"]
    assert found.scripts[-2:] == harmless.scripts[-2:]
    for script in found.scripts[:-3]:
        json.loads(script)


def test_hostile_names_of_files(example: ResultFile, tmp_path: Path) -> None:
    """Not UTF-8, or with characters that reorder text; alone and side by side."""
    record = tmp_path / "\udcff\u202egpj.jsonl"
    record.write_bytes(example.path.read_bytes())
    for paths in ([record], [record, record]):
        text = html(document_of(paths)).encode().decode()
        assert "\u202e" not in text
        assert r"\udcff\u202egpj.jsonl" in text


def test_damaged_plans(example: ResultFile) -> None:
    """They are free-form: an error that names the plan, or a page without the fact."""
    for baseline in ("odirect", {}, {"name": "odirect"}, {"target": "/a"}, {"label": None}):
        run = replace(example.run, plan={**example.run.plan, "baseline": baseline})
        with pytest.raises(ResultFileError, match=r"line 1: plan\.baseline must have"):
            run_document(replace(example, run=run))
    for odd in (7, "x", [7], {"x": [7]}):
        run = replace(example.run, plan={"target": odd, "seed": odd})
        assert html(run_document(replace(example, run=run)))


def test_parts_of_a_page_are_escaped(tmp_path: Path) -> None:
    """Every text of every noun."""
    bad = '<b onclick="x">&'
    record = tmp_path / "<b onclick='x'>&"
    record.write_bytes(b"x")
    grid = Grid(title=bad, columns=(*words(bad), Column(bad)), rows=[[bad, bad]], styles=("green",))
    part = Section(heading=bad, commands=(bad,), grids=(grid,))
    page = Document(
        kind=bad,
        title=bad,
        about=(bad,),
        answer=(
            *(Line(bad, (bad,)), Line(bad, (bad,), commands=True)),
            Line(bad, (bad, bad), caveat=True),
        ),
        tables=(grid,),
        notes=(bad,),
        appendix=(replace(part, sections=(part,)),),
        records=(record,),
    )
    found = _Elements(html(page))
    assert ("b", "onclick") not in found.found
    assert found.text.count(bad) == 32
    assert found.text.count(record.name) == 1


def test_names_break_after_a_comma_and_numbers_do_not() -> None:
    grid = Grid(columns=words("name", "count"), rows=[["hybrid,threads=2,x", "1,000.5 min"]])
    shown = html(Document(kind="", title="", tables=(grid,)))
    assert "hybrid,<wbr>threads=2,<wbr>x<" in shown
    assert ">1,000.5 min<" in shown


def test_a_large_run_is_small_enough(recorded: ResultFile) -> None:
    """12 contenders x 20 repetitions, with series."""
    saves = [s for s in recorded.samples if s.operation == "save" and s.repetition == 0]
    samples = tuple(
        replace(
            one,
            repetition=repetition,
            setting=replace(one.setting, options={**one.options, "number": number}),
            operation=operation,
        )
        for repetition in range(20)
        for number in range(12)
        for operation in ("save", "restore")
        for one in saves[:1]
    )
    page = run_document(replace(recorded, samples=samples))
    assert len(html(page)) < _MOST_BYTES - 2**19  # the record itself takes less than 512 KiB


def test_a_picture(page: Document) -> None:
    """With its answer as the title, as text; nothing in it comes from elsewhere."""
    chart = page.charts["rate-save"]
    svg = draw(chart, "svg").decode()
    assert svg.startswith("<svg")
    assert not re.findall(r'(?:href|src)="(?!#)', svg)
    assert chart.headline.startswith("Save: ")
    assert " ".join(chart.headline.split()[:4]) in svg
    assert draw(chart, "png").startswith(b"\x89PNG")


def test_scripts_do_not_end_their_element() -> None:
    assert inline_script("a = '</script><!--'") == "a = '<\\/script><\\!--'"
