"""Journal: append-only, resumable, and explicit about what it cannot read."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from support.journals import HEADER
from support.simulated_storage import SimulatedStorage

from iobench.errors import ResultFileError
from iobench.tune.journal import Journal, TrialRecord, read_journal
from iobench.tune.objective import Step
from iobench.tune.space import Candidate

ONE = Candidate.of("odirect", {"threads": 3}, "drawn")
STEP = Step(phase="race", round=1, size_bytes=2**20)


def record(step: Step = STEP) -> TrialRecord:
    return TrialRecord.of(ONE, step, SimulatedStorage(seed=1)(ONE, step))


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Header and measurements are equal after reading; the last line says how the tuning ended."""
    path = tmp_path / "new" / "tune.jsonl"
    with Journal.create(path, HEADER) as journal:
        journal.write(record())
    assert read_journal(path) == (HEADER, [record()])
    assert kinds(path) == ["tuning", "trial", "end"]
    assert json.loads(path.read_text().splitlines()[-1])["status"] == "complete"


def test_it_is_durable_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is synced once, after its last line, however the tuning ended."""
    path, fsync = tmp_path / "tune.jsonl", os.fsync
    synced: list[list[str]] = []

    def syncing(fd: int) -> None:
        synced.append(kinds(path))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", syncing)
    with contextlib.suppress(KeyboardInterrupt), Journal.create(path, HEADER) as journal:
        journal.write(record())
        raise KeyboardInterrupt
    assert synced == [["tuning", "trial", "end"]]


def test_it_answers_for_its_own_step_only() -> None:
    """Another candidate, round or size is another trial."""
    assert record().answers(ONE, STEP)
    assert not record().answers(Candidate.of("odirect", {}, "drawn"), STEP)
    assert not record().answers(ONE, Step(phase="race", round=2, size_bytes=2**20))
    assert not record().answers(ONE, Step(phase="race", round=1, size_bytes=2**21))


def test_going_on(tmp_path: Path) -> None:
    """An interrupted journal says so, and a resumed one is appended to."""
    path = tmp_path / "tune.jsonl"
    with contextlib.suppress(KeyboardInterrupt), Journal.create(path, HEADER) as journal:
        journal.write(record())
        raise KeyboardInterrupt
    before = path.read_bytes()
    with Journal.resume(path) as journal:
        assert journal.header == HEADER
        assert journal.trials == (record(),)
        journal.write(record())
    assert path.read_bytes().startswith(before)
    assert kinds(path) == ["tuning", "trial", "end", "trial", "end"]
    assert [json.loads(x).get("status") for x in path.read_text().splitlines()][2] == "interrupted"


def test_a_killed_process_leaves_half_a_line(tmp_path: Path) -> None:
    """Resuming removes it."""
    path = tmp_path / "tune.jsonl"
    with contextlib.suppress(KeyboardInterrupt), Journal.create(path, HEADER) as journal:
        journal.write(record())
        raise KeyboardInterrupt
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:50].replace(b"\n", b" "))
    with Journal.resume(path) as journal:
        assert len(journal.trials) == 1
    assert path.read_bytes().startswith(whole)
    assert kinds(path)[-1] == "end"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no header"),
        ("hello\n", "line 1"),
        ("[" * 100_000 + "\n", "line 1"),
        (
            '{"schema": "iobench.result/1", "kind": "run"}\n',
            "an iobench result file, not a journal",
        ),
        ('{"schema": "iobench.tune/2", "kind": "tuning"}\n', "upgrade iobench"),
        (
            '{"schema": "iobench.tune/1", "kind": "end", "at": "", "status": "failed"}\n',
            "is not a header",
        ),
        (
            '{"schema": "iobench.tune/1", "kind": "tuning"}\n',
            "line 1: Object missing .* `started_at`",
        ),
    ],
)
def test_no_journal(tmp_path: Path, text: str, words: str) -> None:
    """Any other file is refused, with the wrong line, and not changed."""
    path = tmp_path / "tune.jsonl"
    path.write_text(text)
    with pytest.raises(ResultFileError, match=words), Journal.resume(path):
        pytest.fail("it was opened")
    assert path.read_text() == text


def test_a_complete_journal_is_only_read(tmp_path: Path) -> None:
    """Not even when an older version has appended how another process failed. It is not changed."""
    path = tmp_path / "tune.jsonl"
    with Journal.create(path, HEADER) as journal:
        journal.write(record())
    failed = '{"schema": "iobench.tune/1", "kind": "end", "at": "", "status": "failed"}\n'
    for text in (path.read_text(), path.read_text() + failed):
        path.write_text(text)
        with Journal.resume(path) as journal:
            assert (journal.complete, journal.trials) == (True, (record(),))
        assert path.read_text() == text


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    """An existing file is refused; the error says how to resume it."""
    path = tmp_path / "tune.jsonl"
    path.write_text("")
    with pytest.raises(ResultFileError, match=f"--resume {path}"), Journal.create(path, HEADER):
        pytest.fail("it was opened")


def test_where_it_cannot_be_made(tmp_path: Path) -> None:
    """The path leads through a file, and the error says so."""
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "tune.jsonl"
    with pytest.raises(ResultFileError, match="cannot be created"), Journal.create(path, HEADER):
        pytest.fail("it was opened")
