"""Unusual disturbances of a sample: large ones that most other samples do not have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from iobench.report.summary import unusual
from iobench.results import Interference, Sample, read

EXAMPLE = read(Path(__file__).parents[1] / "results" / "example.jsonl")
SAVE = replace(EXAMPLE.samples[0], elapsed_s=1.0, bytes=2**30)
QUIET = Interference(
    steal_s=0.0, memory_stall_s=0.0, foreign_read_bytes=0, foreign_write_bytes=4096
)


def samples(*others: Interference | None) -> list[Sample]:
    """Four quiet samples, followed by these."""
    given = [QUIET, QUIET, QUIET, QUIET, *others]
    return [replace(SAVE, interference=one) for one in given]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"steal_s": 0.25}, "250 ms of CPU stolen"),
        ({"memory_stall_s": 0.5}, "500 ms of waiting for memory"),
        ({"foreign_read_bytes": 2**28}, "256.00 MiB read by others"),
        ({"foreign_write_bytes": 2**28}, "256.00 MiB written by others"),
    ],
)
def test_each_disturbance_has_its_words(change: dict[str, float], word: str) -> None:
    given = samples(replace(QUIET, **change))
    assert unusual(given, 4) == [word]
    assert unusual(given, 0) == []


def test_what_all_samples_have_is_not_unusual() -> None:
    busy = replace(QUIET, steal_s=0.25)
    given = [replace(SAVE, interference=busy)] * 5
    assert unusual(given, 2) == []


def test_what_weighs_nothing_is_not_named() -> None:
    small = replace(QUIET, steal_s=0.009, foreign_write_bytes=2**20)
    assert unusual(samples(small), 4) == []


def test_old_samples_and_missing_counters_say_nothing() -> None:
    unknown = Interference(
        steal_s=None, memory_stall_s=None, foreign_read_bytes=None, foreign_write_bytes=None
    )
    assert unusual(samples(None), 4) == []
    assert unusual(samples(unknown), 4) == []
