"""Pages of the other kinds in a real browser: charts drawn, nothing requested, no error."""

from __future__ import annotations

import json
from pathlib import Path

from support.browser import OpenPage
from support.journals import write_journal

from iobench.claims.claims import study
from iobench.claims.reproduction import judge_records
from iobench.report.claims import claims_document
from iobench.report.compare import compare, compare_document
from iobench.report.kinds import document_of
from iobench.results import read

_RESULTS = Path(__file__).parents[2] / "results"


def test_training(open_page: OpenPage) -> None:
    """A mark per checkpoint; on a phone in the dark."""
    path = _RESULTS / "reference-train-busy-gpt5b-nemo.jsonl"
    blocks = read(path).training
    opened = open_page(document_of([path]), width=400, scheme="dark")
    saves = [save for block in blocks for save in block.saves]
    assert opened.marks("stall", "symbol") == len(saves)
    assert opened.count("figure svg") == opened.count("figure")
    assert opened.run("document.documentElement.scrollWidth") <= 400
    assert opened.tooltip("stall")[0].startswith("repetition")
    assert opened.problems == []


def test_comparison_and_claims(open_page: OpenPage) -> None:
    """A row for each contender, and for each claim; no chart says the same again."""
    old, new = ([read(_RESULTS / f"reference-{one}.jsonl")] for one in ("llama7b", "aa-llama7b"))
    comparison = compare(old, new, 0.05)
    opened = open_page(compare_document(comparison, [*old, *new]), scheme="dark")
    assert opened.count("figure") == 0
    assert opened.count("table tbody tr") >= len(comparison.rows)
    assert opened.problems == []
    records = [read(_RESULTS / "reference-checkfreq-gpt5b-nemo.jsonl")]
    about = study("checkfreq")
    found = judge_records(about, records)
    opened = open_page(claims_document(about, records, found), width=400)
    assert opened.run("document.documentElement.scrollWidth") <= 400
    assert opened.problems == []


def test_hostile_names_in_a_journal_run_nothing(open_page: OpenPage, tmp_path: Path) -> None:
    path = write_journal(tmp_path / "journal.jsonl")
    header, *others = path.read_text().splitlines(keepends=True)
    values = json.loads(header)
    values["machine"]["hostname"] = "</script><script>hit = 1</script>"
    values["storage"]["fs_type"] = values["asked"]["target"] = '" onmouseover="hit = 1" x="'
    path.write_text(f"{json.dumps(values)}\n{''.join(others)}")
    opened = open_page(document_of([path]))
    assert opened.run("typeof hit") == "undefined"
    assert opened.problems == []
