"""Counts of failed restarts beside the checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from iobench.dist.restarts import FailedRestarts


def test_restarts_count_until_the_job_gets_further(tmp_path: Path) -> None:
    """The first load of each start counts; a commit or a good end forgets all of them."""
    first = FailedRestarts(tmp_path)
    assert first.counts() == {}
    first.loaded(20)
    first.loaded(20)
    assert first.counts() == {20: 0}  # this start has not failed yet
    second = FailedRestarts(tmp_path)
    assert second.counts() == {20: 1}
    second.loaded(20)
    second.loaded(10)
    assert second.counts() == {20: 1, 10: 0}
    assert FailedRestarts(tmp_path).counts() == {20: 2, 10: 1}
    assert [path.name for path in tmp_path.iterdir()] == [".iobench-restarts.json"]
    second.progressed()
    second.progressed()
    assert second.counts() == {}
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("text", [b"", b"[1]", b'{"a": 1}', b'{"1": null}', b"\xff"])
def test_a_damaged_file_counts_nothing(tmp_path: Path, text: bytes) -> None:
    """The counts only choose between checkpoints: a job must not fail for them."""
    (tmp_path / ".iobench-restarts.json").write_bytes(text)
    assert FailedRestarts(tmp_path).counts() == {}
    FailedRestarts(tmp_path).loaded(5)
    assert FailedRestarts(tmp_path).counts() == {5: 1}


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    """The job goes on without counts."""
    (tmp_path / ".iobench-restarts.json").mkdir()
    with pytest.warns(RuntimeWarning, match="failed restarts are not counted"):
        assert FailedRestarts(tmp_path).counts() == {}
    with pytest.warns(RuntimeWarning, match="cannot be removed"):
        FailedRestarts(tmp_path).progressed()


def test_other_ranks_count_nothing() -> None:
    """Rank 0 counts for the job."""
    found = FailedRestarts(None)
    found.loaded(5)
    assert found.counts() == {}
    found.progressed()
