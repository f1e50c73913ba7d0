"""A run has a winner if a difference is shown. The noise floor is 2%, or as measured by an A/A
run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from iobench.report.summary import summarise
from iobench.results import ResultFile, Sample, read

REFERENCE = read(Path(__file__).parents[1] / "results" / "recorded.jsonl")


def saves(writer: str, *seconds: float) -> list[Sample]:
    """The recorded saves of a writer, with these durations."""
    recorded = [s for s in REFERENCE.samples if (s.writer, s.operation) == (writer, "save")]
    return [replace(s, elapsed_s=t, phases_s={}) for s, t in zip(recorded, seconds, strict=True)]


def of(*samples: Sample) -> ResultFile:
    """A run of these saves, each verified by a recorded restore."""
    restores = [s for s in REFERENCE.samples if s.operation == "restore" and s.writer == "odirect"]
    proof = restores[0].verified
    return replace(REFERENCE, samples=tuple(replace(s, verified=proof) for s in samples))


def test_the_reference_run_names_what_it_shows() -> None:
    save, restore = summarise(REFERENCE).winners
    assert (save.fastest, save.equals) == ("odirect", ("uncached",))
    assert restore.equals == ()


def test_a_difference_within_the_measured_noise_is_none() -> None:
    """The A/A twins differ by up to 10%, the other writer by 5%."""
    first, twin = saves("odirect", *[1.0] * 5), saves("odirect", 1.0, 1.1, 0.95, 1.0, 1.05)
    result = of(*first, *twin, *saves("buffered", *[1.07] * 5))
    (winner,) = summarise(result).winners
    assert winner.measured
    assert winner.floor == pytest.approx(0.1)
    assert winner.equals


def test_an_aa_run_of_one_writer_has_its_floor() -> None:
    first, twin = saves("odirect", *[1.0] * 5), saves("odirect", 1.0, 1.03, 1.0, 0.99, 1.0)
    (winner,) = summarise(of(*first, *twin)).winners
    assert (winner.by_aa, winner.floor) == ("A/A", pytest.approx(0.03))
