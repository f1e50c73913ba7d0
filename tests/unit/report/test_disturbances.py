"""What others did while a sample was measured, where it is large enough to explain something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iobench.report.summary import disturbances
from iobench.results import Interference, read

EXAMPLE = read(Path(__file__).parents[1] / "results" / "example.jsonl")
SAVE = replace(EXAMPLE.samples[0], elapsed_s=1.0, bytes=2**30)
_NAMES = ("steal_s", "memory_stall_s", "foreign_read_bytes", "foreign_write_bytes")
QUIET = Interference(**dict.fromkeys(_NAMES, 0))
_NOTHING = "nothing unusual seen"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steal_s": 0.25}, "250 ms of CPU stolen"),
        ({"memory_stall_s": 0.5}, "500 ms of waiting for memory"),
        ({"foreign_read_bytes": 2**28}, "256.00 MiB read by others"),
        ({"foreign_write_bytes": 2**28}, "256.00 MiB written by others"),
        ({"steal_s": 0.009, "foreign_write_bytes": 2**20}, _NOTHING),
        (dict.fromkeys(_NAMES), _NOTHING),
        (None, ""),
    ],
)
def test_each_disturbance_has_its_words(change: dict[str, Any] | None, words: str) -> None:
    """Small ones are not named, nor those that the kernel does not count."""
    seen = None if change is None else replace(QUIET, **change)
    assert disturbances(replace(SAVE, interference=seen)) == words
