"""Replicas of real ranks: kill -9 of trainers, agents and nodes, and what a restart finds."""

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

from iobench.dist.replicas.runtime import AgentDirectory, AgentRecord

_TESTS = Path(__file__).parents[1]
Told = list[list[dict[str, Any]]]


class Job:
    """A job with one rank per node; every node is a runtime directory in `base`."""

    def __init__(self, base: Path, size: int, scheme: str, **options: Any) -> None:
        self.base, self.size, self.scheme, self.options = base, size, scheme, options
        self.module = "support.replica_rank"
        for node in range(size):
            (base / f"n{node}").mkdir(mode=0o700)

    def run(
        self,
        steps: Sequence[int],
        end: str,
        *,
        hosts: Sequence[int] | None = None,
        run_id: str = "run",
        **breaks: Any,
    ) -> Told:
        """Start the ranks; return what each has told when all have ended or wait, then killed."""
        asked = {
            "base": str(self.base),
            "hosts": [f"n{host}" for host in hosts or range(self.size)],
            "scheme": self.scheme,
            "steps": list(steps),
            "end": end,
            "options": self.options,
            **breaks,
        }
        environ = {
            "REPLICA_TEST": json.dumps(asked),
            "TORCHELASTIC_RUN_ID": f"{self.base.name}-{run_id}",
            "PYTHONPATH": os.pathsep.join([str(_TESTS.parent), str(_TESTS)]),
        }
        code = f"from {self.module} import main; main()"
        lines = breaks.get("load", True) + len(steps) + (end != "wait")
        told: Told = []
        with start_ranks(code, self.size, environ=environ, local_size=1) as ranks:
            for rank in range(self.size):
                own = []
                while len(own) < lines and (line := ranks.line(rank)):
                    own.append(json.loads(line))
                if len(own) < lines and breaks.get("kill_rank", [None])[0] != rank:
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


def test_trainers_killed(base: Path) -> None:
    """Agents outlive kill -9; each rank restores from its own node; a good end leaves nothing."""
    job = Job(base, 2, "partner")
    told = job.run([10, 20], "wait")
    assert _loads(told) == [(None, None), (None, None)]
    assert _outcomes(told) == [(10, "complete"), (20, "complete")]
    assert all(job.agents())
    told = job.run([30], "finish")
    assert _loads(told) == [(20, True, "own"), (20, True, "own")]
    assert _outcomes(told) == [(30, "complete")]
    assert job.ended()


def test_a_node_lost_and_numbers_exchanged(base: Path) -> None:
    """The partner has the bytes of a lost node; other nodes come back with other numbers."""
    job = Job(base, 3, "partner")
    job.run([10], "wait")
    job.lose(0)
    told = job.run([20], "wait", hosts=[2, 0, 1])
    assert _loads(told) == [(10, True, "peer")] * 3  # every node has other ranks' bytes only
    told = job.run([], "finish")
    assert _loads(told) == [(20, True, "own")] * 3  # as partner, each node has what it now needs
    assert job.ended()


def test_parity_of_a_group(base: Path) -> None:
    """One lost node of a group is recovered from parity, two are not."""
    job = Job(base, 3, "xor", group=3)
    job.run([10], "wait")
    job.lose(2)
    told = job.run([20], "wait")
    assert _loads(told) == [(10, True, "own"), (10, True, "own"), (10, True, "parity")]
    assert _outcomes(told) == [(20, "complete")]
    job.lose(0)
    job.lose(1)
    told = job.run([], "finish")
    assert _loads(told) == [(None, None)] * 3
    assert job.ended()


def test_an_agent_killed_during_training(base: Path) -> None:
    """The save has no replica, which is told; the next one has, from a new agent."""
    job = Job(base, 2, "partner")
    told = job.run([10, 20, 30], "finish", kill_agent=[1, 20])
    assert _outcomes(told) == [(10, "complete"), (20, "failed"), (30, "complete")]
    assert "step 20 has no replica" in told[0][2]["told"][0]
    assert job.ended()


def test_a_rank_killed_before_its_replica(base: Path) -> None:
    """The others stop replicating and name it; a restart finds the version that all had."""
    job = Job(base, 2, "partner")
    told = job.run([10, 20], "leave", kill_rank=[1, 20])
    assert _outcomes(told) == [(10, "complete"), (20, "failed")]
    assert "rank 1" in told[0][2]["reason"]
    assert "no replicas are made from step 20 on" in told[0][2]["told"][0]
    told = job.run([], "finish")
    assert _loads(told) == [(10, True, "own"), (10, True, "own")]
    assert job.ended()


def test_memory_full_on_every_node(base: Path) -> None:
    """Nothing is taken beyond the budget; training goes on, and every failure is told."""
    job = Job(base, 2, "partner", memory="4MiB")
    told = job.run([10, 20], "finish")
    assert _outcomes(told) == [(10, "failed"), (20, "failed")]
    assert "do not fit the agent's budget" in told[0][1]["reason"]
    assert job.ended()


def test_another_run_of_the_same_location(base: Path) -> None:
    """Another token: the memory of the earlier run is freed and never loaded."""
    job = Job(base, 2, "partner")
    job.run([10], "wait")
    before = job.agents()
    told = job.run([], "finish", run_id="other")
    assert _loads(told) == [(None, None)] * 2
    assert not any(record and record.alive for record in before)
    assert job.ended()


class Training(Job):
    """A job that trains with a Checkpointer."""

    def __init__(self, base: Path, size: int, scheme: str, **options: Any) -> None:
        super().__init__(base, size, scheme, **options)
        self.module = "support.replica_training"

    def train(self, location: Path, steps: Sequence[int], end: str, **breaks: Any) -> Told:
        """Load unless this is the first start, save `steps`, and end."""
        return self.run(steps, end, location=str(location), **breaks)


def test_a_checkpointer_restores_from_the_nearest_copy(base: Path, tmp_path: Path) -> None:
    """Own memory; a step that only memory has, after the loss of a node; then storage."""
    job, run = Training(base, 2, "partner"), tmp_path / "run"
    told = job.train(run, [10], "wait", load=False)
    assert _outcomes(told) == [(10, "complete")]
    told = job.train(run, [20], "wait", bandwidth_limit="100KiB")
    assert _loaded(told) == [(10, True, ["memory (own)"])] * 2
    assert not (run / "step-20").exists()  # memory has it first: the storage is slow
    job.lose(1)
    told = job.train(run, [30], "finish")
    assert _loaded(told) == [(20, True, ["memory (own)"]), (20, True, ["memory (peer)"])]
    assert job.ended()
    told = job.train(run, [], "finish")  # the memory has ended with the job
    assert [one[:2] for one in _loaded(told)] == [(30, True)] * 2
    assert not any("memory" in path for one in _loaded(told) for path in one[2])
    assert job.ended()


def _loaded(told: Told) -> list[tuple[int, bool, list[str]]]:
    """Step, whether the state is equal, and the paths of its bytes, for each rank."""
    return [(one[0]["loaded"], one[0]["equal"], one[0]["paths"]) for one in told]
