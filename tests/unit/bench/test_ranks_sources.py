"""Which rank's checkpoint each rank restores."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.bench.contenders.base import WriterContender
from iobench.bench.processes.job import CheckpointRef, Job
from iobench.bench.ranks.members import same_node, sources_of
from iobench.units import MIB
from iobench.workloads import Workload
from iobench.writers.registry import make


@pytest.mark.parametrize(
    ("nodes", "sources"),
    [
        ([0], [0]),
        ([0, 0, 0], [0, 1, 2]),  # one node: its own
        ([0, 1], [1, 0]),
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 1, 0, 1], [1, 0, 3, 2]),  # ranks dealt over the nodes in turn
        ([0, 0, 0, 1], [3, 0, 1, 2]),  # more than half on one node
    ],
)
def test_ranks_are_shifted_by_a_node(nodes: list[int], sources: list[int]) -> None:
    assert sources_of(nodes) == sources


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_every_rank_is_read_once_and_by_another_node(nodes: list[int]) -> None:
    """By another node wherever the ranks on the nodes allow it."""
    sources = sources_of(nodes)
    assert sorted(sources) == list(range(len(nodes)))
    largest = max(nodes.count(node) for node in nodes)
    if 2 * largest <= len(nodes):
        assert same_node(nodes, sources) == []
    else:  # so many of the largest node cannot have another source
        assert len(same_node(nodes, sources)) >= 2 * largest - len(nodes)


class _Control:
    """The calls of two ranks, which are threads."""

    def __init__(self, rank: int, given: dict[str, list[Any]], meet: threading.Barrier) -> None:
        self._rank, self._given, self._meet = rank, given, meet

    def sub(self, _name: str) -> _Control:
        return self

    def gather(self, what: str, own: Any, deadline_s: float) -> list[Any] | None:
        self._given.setdefault(what, [None, None])[self._rank] = own
        self._meet.wait(10)
        return self._given[what] if self._rank == 0 else None

    def scatter(self, what: str, every: list[Any] | None, deadline_s: float) -> Any:
        if every is not None:
            self._given[what] = every
        self._meet.wait(10)
        return self._given[what][self._rank]


def test_a_rank_restores_an_earlier_checkpoint_of_another_rank(
    tiny: Workload, tmp_path: Path
) -> None:
    """By `--rules mlperf` all are saved first. The bytes of each are compared with those that its
    rank saved then, and not with its last ones."""
    files, calls = [tuple(tiny.files(n)) for n in (0, 1)], dict[str, list[Any]]()
    meet = threading.Barrier(2)
    jobs = [
        Job(
            contenders=(WriterContender(make("buffered")),),
            files=(files[n],),
            pool_bytes=MIB,
            seed=n,
            number=n,
            source=1 - n,
            source_files=(files[1 - n],),
        )
        for n in (0, 1)
    ]
    refs = [
        CheckpointRef(contender=0, shape=0, directory=str(tmp_path / name)) for name in ("a", "b")
    ]
    for job in jobs:
        for ref in refs:
            job.prepare(0, ())
            job.keep(0, ref.directory)
            job.save(ref)

    def restored(number: int, ref: CheckpointRef) -> int:
        job = jobs[number]
        job._control = _Control(number, calls, meet)  # type: ignore[assignment]  # a double
        job.scrub(0, None)
        job.recall(0, ref.directory)
        job.hand_over(0, sources=[1, 0])
        job.restore(ref)
        return job.verify(ref).mismatches

    with ThreadPoolExecutor(2) as ranks:
        for ref in refs:
            assert list(ranks.map(partial(restored, ref=ref), (0, 1))) == [0, 0]
