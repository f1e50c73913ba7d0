"""The page of a journal: race and confirmation are those of its trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.journals import write_journal

from iobench.errors import IobenchError, ResultFileError, UnknownNameError
from iobench.report.kinds import document_of
from iobench.report.page.html import html
from iobench.tune.journal import read_journal
from iobench.tune.replay import replay

_GRID = Path(__file__).parents[4] / "results" / "benchmarks" / "autotune-grid.jsonl"


def test_a_finished_tuning(tmp_path: Path) -> None:
    """A row per setting of the race, and one per setting of the confirmation."""
    path = write_journal(tmp_path / "journal.jsonl")
    raced, outcome = replay(*read_journal(path))
    assert outcome is not None
    page = document_of([path])
    (race,) = page.details.tables
    assert {name: int(rounds) for name, rounds, *_ in race.rows} == {
        name: len(one.losses) for name, one in raced.trials.items()
    }
    confirmed = outcome.standings()
    assert [row[0] for row in page.tables[0].rows] == [one.candidate.label for one in confirmed]
    words = " ".join(text for line in page.answer for text in line.texts)
    assert all(reason in words for reason in outcome.reasons())
    assert not any(line.caveat for line in page.answer)
    assert outcome.chosen.label in html(page)


def test_an_unfinished_tuning_says_so() -> None:
    """A journal without a confirmation has its race, and no answer."""
    page = document_of([_GRID])
    (line,) = page.answer
    assert line.caveat
    assert "--resume" in line.texts[0]
    assert [grid.title for grid in page.tables] == ["race"]
    assert not page.charts


def changed(path: Path, **asked: Any) -> Path:
    """The journal with other values in `asked`; None removes one."""
    header, *others = write_journal(path).read_text().splitlines(keepends=True)
    values = json.loads(header)
    values["asked"] = {k: v for k, v in (values["asked"] | asked).items() if v is not None}
    path.write_text(f"{json.dumps(values)}\n{''.join(others)}")
    return path


@pytest.mark.parametrize(
    "asked",
    [
        *({"objective": 3}, {"max_s": "long"}, {"max_s": -1}),
        *({"workload": None}, {"max_bytes": []}),
        *({"rank": "first"}, {"largest_bytes": "much"}),
    ],
)
def test_a_broken_journal_is_one_error(tmp_path: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(IobenchError) as raised:
        document_of([changed(tmp_path / "journal.jsonl", **asked)])
    assert len(str(raised.value)) < 300


def test_a_time_that_is_none_is_one_error(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "journal.jsonl")
    path.write_text(path.read_text().replace("2026-01-01T00:00:00Z", "yesterday", 1))
    with pytest.raises(ResultFileError, match="line 1: started_at must be ISO 8601"):
        document_of([path])


def test_a_writer_that_is_not_installed_is_named(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "journal.jsonl")
    path.write_text(path.read_text().replace('"writer": "aiofiles"', '"writer": "of-others"'))
    with pytest.raises(UnknownNameError, match="of-others"):
        document_of([path])
