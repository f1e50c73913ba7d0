"""Replicas of real ranks: kill -9 of trainers and nodes, and what a restart finds.

Without root: tests/faults/test_ranks_replicas.py has attacks on a Checkpointer with replicas.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.agents import runtime_directories
from support.ranks import start_ranks

from iobench.replicas.runtime import AgentDirectory, AgentRecord

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

    def agents(self) -> list[AgentRecord | None]:
        """The agent of each node."""
        found = []
        for node in range(self.size):
            paths = [path for path in (self.base / f"n{node}").iterdir() if path.is_dir()]
            found.append(AgentDirectory(paths[0]).record() if paths else None)
        return found

    def lose(self, node: int) -> None:
        """Kill the agent of a node, as if the node had lost its power."""
        record = self.agents()[node]
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
        while record.alive:
            time.sleep(0.01)

    def ended(self) -> bool:
        """Whether every agent has ended, and has removed its files."""
        deadline = time.monotonic() + 20
        while any(self.agents()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not [path for path in self.base.glob("*/*") if path.is_dir()]


@pytest.fixture
def base() -> Iterator[Path]:
    """The nodes' directories; a test that leaves an agent fails."""
    with runtime_directories() as made:
        yield made


def _loads(told: Told) -> list[tuple[Any, ...]]:
    """Step, whether the bytes are equal, and the kinds of sources, for each rank."""
    return [(own[0]["loaded"], own[0].get("equal"), *own[0].get("read", {})) for own in told]


def _outcomes(told: Told, rank: int = 0) -> list[tuple[int, str]]:
    return [(one["step"], one["outcome"]) for one in told[rank] if "step" in one]


def test_a_node_lost_and_numbers_exchanged(base: Path) -> None:
    """The partner has the bytes of a lost node; other nodes come back with other numbers."""
    job = Job(base, 3)
    job.run([10], "wait")
    job.lose(0)
    told = job.run([20], "wait", hosts=[2, 0, 1])
    assert _loads(told) == [(10, True, "peer")] * 3  # every node has other ranks' bytes only
    told = job.run([], "finish")
    assert _loads(told) == [(20, True, "own")] * 3  # as partner, each node has what it now needs
    assert job.ended()


def test_both_nodes_of_a_pair_are_lost(base: Path) -> None:
    """One lost node is recovered from its partner; of two, nothing is loaded from memory."""
    job = Job(base, 2)
    job.run([10], "wait")
    job.lose(1)
    told = job.run([20], "wait")
    assert _loads(told) == [(10, True, "own"), (10, True, "peer")]
    assert _outcomes(told) == [(20, "complete")]
    job.lose(0)
    job.lose(1)
    told = job.run([], "finish")
    assert _loads(told) == [(None, None)] * 2
    assert job.ended()


def test_memory_full_on_every_node(base: Path) -> None:
    """Nothing is taken beyond the budget; training goes on, and every failure is told."""
    job = Job(base, 2, memory="4MiB")
    told = job.run([10, 20], "finish")
    assert _outcomes(told) == [(10, "failed"), (20, "failed")]
    assert "do not fit the agent's budget" in told[0][1]["reason"]
    assert job.ended()


def test_another_run_of_the_same_location(base: Path) -> None:
    """Another token: the memory of the earlier run is freed and never loaded."""
    job = Job(base, 2)
    job.run([10], "wait")
    before = job.agents()
    told = job.run([], "finish", run_id="other")
    assert _loads(told) == [(None, None)] * 2
    assert not any(record and record.alive for record in before)
    assert job.ended()
