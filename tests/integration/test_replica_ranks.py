"""Replicas of real ranks without root: kill -9 of trainers, lost memory, and what a restart finds.

tests/faults/test_ranks_replicas.py has attacks on nodes with networks of their own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.ranks import start_ranks

_TESTS = Path(__file__).parents[1]
Told = list[list[dict[str, Any]]]


class Job:
    """A job with one rank per node; every node is a runtime directory in `base`."""

    def __init__(self, base: Path, size: int, **options: Any) -> None:
        self.base, self.size, self.options = base, size, options
        for node in range(size):
            (base / f"n{node}").mkdir(mode=0o700)

    def run(
        self,
        steps: Sequence[int],
        end: str,
        *,
        hosts: Sequence[int] | None = None,
        run_id: str = "run",
    ) -> Told:
        """Start the ranks; return what each has told when all have ended or wait, then killed."""
        asked = {
            "base": str(self.base),
            "hosts": [f"n{host}" for host in hosts or range(self.size)],
            "steps": list(steps),
            "end": end,
            "options": self.options,
        }
        environ = {
            "REPLICA_TEST": json.dumps(asked),
            "TORCHELASTIC_RUN_ID": f"{self.base.name}-{run_id}",
            "PYTHONPATH": os.pathsep.join([str(_TESTS.parent), str(_TESTS)]),
        }
        code = "from support.replica_rank import main; main()"
        lines = 1 + len(steps) + (end != "wait")
        told: Told = []
        with start_ranks(code, self.size, environ=environ, local_size=1) as ranks:
            for rank in range(self.size):
                own = []
                while len(own) < lines and (line := ranks.line(rank)):
                    own.append(json.loads(line))
                if len(own) < lines:
                    raise AssertionError(f"rank {rank}: {own} {ranks.end(rank)}")
                told.append(own)
        return told

    def files(self, node: int) -> list[Path]:
        """The bytes of ranks in the memory of a node."""
        return sorted(self.base.glob(f"n{node}/replicas/*/*/__*_0.distcp"))

    def lose(self, node: int) -> None:
        """Remove what is in the memory of a node, as if it had lost its power."""
        assert self.files(node)
        shutil.rmtree(self.base / f"n{node}" / "replicas")


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """The directories of the nodes; a test that leaves replicas in them fails."""
    yield tmp_path
    assert not list(tmp_path.glob("n*/replicas/*"))


def _loads(told: Told) -> list[tuple[Any, ...]]:
    """Step, whether the bytes are equal, the copies, and the ways of the bytes, for each rank."""
    return [
        (own[0]["loaded"], own[0]["equal"], list(own[0]["sources"]), own[0]["paths"])
        for own in told
    ]


def _outcomes(told: Told, rank: int = 0) -> list[tuple[int, str]]:
    return [(one["step"], one["outcome"]) for one in told[rank] if "step" in one]


_OWN = ["replicas"], []
_SENT = ["replicas"], ["network"]


def test_a_node_lost_and_numbers_exchanged(base: Path) -> None:
    """The partner has the bytes of a lost node; other nodes come back with other numbers."""
    job = Job(base, 3)
    told = job.run([10], "wait")
    assert _outcomes(told) == [(10, "complete")]
    assert [[file.name for file in job.files(node)] for node in range(3)] == [
        ["__0_0.distcp", "__2_0.distcp"],  # a ring: node 0 keeps the bytes of node 2
        ["__0_0.distcp", "__1_0.distcp"],
        ["__1_0.distcp", "__2_0.distcp"],
    ]
    job.lose(0)
    told = job.run([20], "wait", hosts=[2, 0, 1])
    # Rank 0 is on node 2, which has 1 and 2; rank 1 on node 0, without any; rank 2 on node 1.
    assert _loads(told) == [(10, True, *_SENT)] * 3
    told = job.run([], "finish", hosts=[2, 0, 1])
    assert _loads(told) == [(20, True, *_OWN)] * 3


def test_both_nodes_of_a_pair_are_lost(base: Path) -> None:
    """One lost node is recovered from its partner; of two, storage is read."""
    job = Job(base, 2)
    job.run([10], "wait")
    job.lose(1)
    told = job.run([20], "wait")
    assert _loads(told) == [(10, True, *_OWN), (10, True, *_SENT)]
    assert _outcomes(told) == [(20, "complete")]
    job.lose(0)
    job.lose(1)
    told = job.run([], "finish")
    assert [one[:3] for one in _loads(told)] == [(20, True, [])] * 2


def test_memory_full_on_every_node(base: Path) -> None:
    """Nothing is taken beyond the budget; training goes on, and every failure is told."""
    job = Job(base, 2, memory="4MiB")
    told = job.run([10, 20], "finish")
    assert _outcomes(told) == [(10, "failed"), (20, "failed")]
    assert "do not fit the budget" in told[0][1]["reason"]
    assert "step 10 has no replica: " in told[0][1]["told"][0]


def test_another_run_of_the_same_location(base: Path) -> None:
    """The memory of the earlier run is freed and never loaded. No other user can read it."""
    job = Job(base, 2)
    job.run([10], "wait")
    assert {path.stat().st_mode & 0o077 for path in base.glob("n*/replicas/*")} == {0}
    told = job.run([], "finish", run_id="other")
    assert [one[:3] for one in _loads(told)] == [(10, True, [])] * 2
