"""The ranks of a row: rates, and stragglers by host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest

from iobench.bench.judging.ranks import RankRates, rank_rates
from iobench.report.run import notes
from iobench.report.summary import summarise
from iobench.results import ResultFile, Sample, WorldFacts
from iobench.units import GIB

WORLD = WorldFacts(
    launcher="slurm",
    size=4,
    nodes=2,
    hosts=("a", "a", "b", "b"),
    node=(0, 0, 1, 1),
    interface=None,
    restored_from=(2, 3, 0, 1),
    clock_offset_s=(0.0,) * 4,
    clock_error_s=(0.0,) * 4,
)


@pytest.fixture
def sample(example: ResultFile) -> Callable[..., Sample]:
    """A sample whose ranks were done after so many seconds."""

    def make(*done_s: float, jobs_bytes: tuple[int, ...] = (GIB,) * 4) -> Sample:
        return replace(example.samples[0], jobs_done_s=done_s, jobs_bytes=jobs_bytes)

    return make


@pytest.fixture
def lines(example: ResultFile) -> Callable[[int, RankRates], list[str]]:
    """The notes about the ranks of a row of so many samples."""

    def make(samples: int, rates: RankRates) -> list[str]:
        report = summarise(example)
        row = replace(report.summaries[0], label="x", samples=samples, ranks=rates)
        found = [*chain(*notes(replace(report, summaries=(row,))))]
        return [one for one in found if one.startswith(("ranks of", "stragglers of"))]

    return make


_Lines = Callable[[int, RankRates], list[str]]


def test_rates_and_stragglers(sample: Callable[..., Sample], lines: _Lines) -> None:
    """Medians over the samples; a straggler takes more than 1.2 times the median of its sample."""
    samples = [sample(1, 1, 1, 2), sample(1, 1, 1, 4), sample(1, 1, 1.1, 1.15)]
    rates = rank_rates(samples, WORLD)
    assert rates is not None
    assert (rates.slowest.rank, rates.slowest.host) == (3, "b")
    assert rates.slowest.bytes_per_s == GIB / 2
    assert (rates.fastest.bytes_per_s, rates.median_bytes_per_s) == (GIB, GIB)
    (one,) = rates.stragglers
    assert (one.rank, one.host, one.samples, one.worst, one.bytes) == (3, "b", 2, 4.0, 1.0)
    late, ranks = lines(3, rates)
    assert late == "stragglers of x save: host b: rank 3 in 2 of 3, up to 4.00x the median"
    assert ranks.startswith("ranks of x save: 0.50 GiB/s (rank 3, host b) to 1.00 GiB/s (rank ")


def test_more_bytes_explain_a_straggler(sample: Callable[..., Sample], lines: _Lines) -> None:
    """Rank 0 of many frameworks writes far more than others. Ranks without bytes have no rate."""
    samples = [sample(4, 1, 1, 0.1, jobs_bytes=(4 * GIB, GIB, GIB, 0))]
    rates = rank_rates(samples, WORLD)
    assert rates is not None
    assert {rates.slowest.rank, rates.fastest.rank} <= {0, 1, 2}
    assert lines(1, rates)[0].endswith(
        "rank 0 in 1 of 1, up to 4.00x the median, with 4x the bytes"
    )


def test_idle_ranks_are_no_measure(sample: Callable[..., Sample]) -> None:
    """Without slices one rank writes everything: it is no straggler behind those with no work."""
    samples = [sample(3, 0.1, 0.1, 0.1, jobs_bytes=(GIB, 0, 0, 0))]
    rates = rank_rates(samples, WORLD)
    assert rates is not None
    assert (rates.slowest, rates.stragglers) == (rates.fastest, ())


def test_without_stragglers_there_is_no_line(sample: Callable[..., Sample], lines: _Lines) -> None:
    """All within 1.2 times the median."""
    rates = rank_rates([sample(1, 1.1, 1.1, 1.2)], WORLD)
    assert rates is not None
    assert len(lines(1, rates)) == 1


def test_other_runs_have_no_ranks(sample: Callable[..., Sample]) -> None:
    """Those of --numjobs, older records, and ranks that all move nothing."""
    assert rank_rates([sample(1, 1, 1, 1)], None) is None
    assert rank_rates([sample(1, 1, 1, 1, jobs_bytes=())], WORLD) is None
    assert rank_rates([sample(1, 1, 1, 1, jobs_bytes=(0,) * 4)], WORLD) is None


def test_each_rank_has_its_facts() -> None:
    """A record with too few hosts is refused when it is read."""
    with pytest.raises(ValueError, match="hosts must have 5 values, and has 4"):
        WorldFacts(**{**vars(WORLD), "size": 5})
