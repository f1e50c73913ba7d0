"""Attacks on replicas in the memory of nodes: on agents, memory, network, ranks and nodes.

Each start of a job loads the newest step and checks every value, so it finds out what the test
before has left. The agents live from test to test.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.node_agents import agents_of, flip_memory, kill_agent
from support.nodes import Nodes, open_nodes
from support.replica_job import REPLICA_PRELOAD, ReplicaJob, loads, outcomes, told
from support.saved_run import expect_lost
from support.tiers import until

_LIMIT_S = 60
_NODE = "iobench.replicas.node.NodeAgents"
_COPY, _PUSH = f"{_NODE}.copy", f"{_NODE}.push"
_SETTLE = "iobench.replicas.replicator.Replicator._settle"
_FETCH = "iobench.replicas.fetch.Fetcher.fetch"
_ARRIVED = "iobench.replicas.fetch.PeerRun._read:after"
_PUBLISH = "iobench.checkpoint.ranked.dcp_files.DcpFormat.publish"
_DIFFER = "the bytes differ from their checksum"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    directory = tmp_path_factory.mktemp("nodes")
    with open_nodes(3, directory=directory, preload=REPLICA_PRELOAD) as made:
        yield made


@pytest.fixture(scope="module")
def job(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaJob]:
    """A job on nodes 0 and 1, which keep each other's bytes. After a good end nothing is left in
    memory, and the next start reads from storage."""
    made = ReplicaJob(nodes, tmp_path_factory.mktemp("job"))
    yield made
    made.finish()
    until(lambda: not any(node.running() for node in nodes))  # an agent answers, and then ends
    for rank in made.finish():
        assert "memory" not in loads(rank)[1]


@pytest.fixture(autouse=True)
def _only_agents_are_left(nodes: Nodes) -> Iterator[None]:
    yield
    running = [node.running() for node in nodes]
    agents = [agents_of(found) for found in running]
    others = {pid for found in running for pid in found}.difference(*agents)
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    assert not others, running
    assert max(map(len, agents)) <= 1, running


@pytest.mark.parametrize("point", [_COPY, _PUSH])
def test_agent_killed_before_a_transfer(job: ReplicaJob, point: str) -> None:
    """That save has no replica, which all ranks tell; it is on storage, and the next one has."""
    ranks = job.start(3, points={1: [f"{point}:before:2:agents"]})
    job.leave(ranks)
    for rank in ranks:
        assert outcomes(rank) == ["complete", "failed", "complete"], rank.stdout()
        assert f"step {job.newest - 1} has no replica: rank " in told(rank)


def test_agent_killed_during_a_transfer(job: ReplicaJob) -> None:
    """The one that receives. The sender tells it, and reaches the new agent with the next save."""
    ranks = job.start(2, options={"rate": "1MB"}, points={0: [f"{_PUSH}:before:1:note"]})
    ranks[0].wait_for("NodeAgents.push", _LIMIT_S)
    job.nodes.sleep(0.2)  # of 1.3 s
    before = job.agent(job.nodes[1])
    kill_agent(before)
    job.leave(ranks)
    assert job.agent(job.nodes[1]) != before
    for rank in ranks:
        assert outcomes(rank) == ["failed", "complete"], rank.stdout()
        assert f"step {job.newest - 1} has no replica: rank " in told(rank)


def test_agent_killed_and_wrong_bits_on_the_wire(job: ReplicaJob) -> None:
    """While a rank restores. Its own memory is gone, and what the partner sends arrives damaged:
    this piece comes from storage. Both are told, and the next save has a replica."""
    newest = job.hold()
    ranks = job.start(1, points={1: [f"{_FETCH}:before:1:agents", f"{_ARRIVED}:1:flip"]})
    job.leave(ranks)
    assert [loads(rank)[0] for rank in ranks] == [newest, newest]
    assert loads(ranks[0])[1] == '["memory (own)"]'
    sources = json.loads(loads(ranks[1])[1])
    assert "memory (peer)" in sources
    assert "memory (own)" not in sources
    assert len(sources) > 1
    assert "a replica was replaced: rank 0, 1 pieces from node 1: " in told(ranks[1])
    assert f"a replica was replaced: rank 0, 1 pieces from node 0: {_DIFFER}" in told(ranks[1])
    assert not told(ranks[0])
    assert outcomes(ranks[0]) == outcomes(ranks[1]) == ["complete"]


def test_wrong_bit_in_memory(job: ReplicaJob) -> None:
    """The piece comes from the partner's memory, which is told."""
    newest = job.hold()
    assert flip_memory(job.agent(job.nodes[0])) >= 2
    ranks = job.start(1)
    job.leave(ranks)
    assert [loads(rank)[0] for rank in ranks] == [newest, newest]
    assert loads(ranks[0])[1] == '["memory (own)", "memory (peer)"]'
    assert f"a replica was replaced: rank 0, 1 pieces from node 0: {_DIFFER}" in told(ranks[0])
    assert not told(ranks[1])


def test_memory_full_on_one_node(job: ReplicaJob) -> None:
    """Nothing is taken beyond the limit. Saves go on without replicas, and all ranks tell it."""
    job.hold()
    kill_agent(job.agent(job.nodes[1]))
    ranks = job.start(2, options_of={1: {"memory": "3MiB"}})
    job.leave(ranks)
    for rank in ranks:
        assert outcomes(rank) == ["failed", "failed"], rank.stdout()
        assert f"step {job.newest} has no replica: rank " in told(rank)
        assert "do not fit the agent's budget" in told(rank)


def _only_in_memory(job: ReplicaJob) -> int:
    """Let the ranks be killed when they have a newest step in memory, and not on storage yet.
    Return the step."""
    step = job.hold() + 1
    ranks = job.start(1, points={0: [f"{_PUBLISH}:before:1:hang"]})
    for rank in ranks:
        rank.wait_for(f"replica {step} complete", _LIMIT_S)
    for rank in ranks:
        rank.kill()
    job.nodes.wait(ranks, _LIMIT_S)
    job.expect_complete(ranks)
    assert job.newest == step - 1
    return step


def test_node_replaced_and_numbers_exchanged(job: ReplicaJob) -> None:
    """Rank 0 comes to a new node, and reads from the memory of the other one a step that is not on
    storage."""
    step = _only_in_memory(job)
    job.nodes[1].lose_power()
    job.nodes[1].boot()
    ranks = job.start(1, order=(1, 0))
    job.leave(ranks)
    assert loads(ranks[0]) == (step, '["memory (peer)"]')
    assert loads(ranks[1]) == (step, '["memory (own)"]')
    assert outcomes(ranks[0]) == outcomes(ranks[1]) == ["complete"]


def test_all_agents_killed_while_restoring(job: ReplicaJob) -> None:
    """The step that only memory had is lost; all ranks load the one before it, which is told."""
    step = _only_in_memory(job)
    points = {rank: [f"{_FETCH}:before:1:agents"] for rank in (0, 1)}
    ranks = job.start(1, points=points)
    job.leave(ranks)
    assert [loads(rank)[0] for rank in ranks] == [step - 1, step - 1]
    assert f"the replicas of step {step} are not used: " in told(ranks[0])
    assert outcomes(ranks[0]) == outcomes(ranks[1]) == ["complete"]


def test_short_partition_during_a_transfer(job: ReplicaJob) -> None:
    """Training goes on when the node is back, and so do replicas."""
    ranks = job.start(2, options={"rate": "1MB"}, points={0: [f"{_PUSH}:before:1:note"]})
    ranks[0].wait_for("NodeAgents.push", _LIMIT_S)
    job.nodes[1].link("down")
    job.nodes.sleep(0.5)
    job.nodes[1].link("up")
    job.leave(ranks)
    assert [outcomes(rank)[-1] for rank in ranks] == ["complete", "complete"]


def test_long_partition_during_a_transfer(job: ReplicaJob) -> None:
    """Both sides end, each with the name of the other one; the next start goes on."""
    options = {"rate": "1MB"}
    ranks = job.start(2, options=options, points={0: [f"{_PUSH}:before:1:note"]}, silent_s=2)
    ranks[0].wait_for("NodeAgents.push", _LIMIT_S)
    job.nodes[1].link("down")
    try:
        expect_lost(job.nodes, ranks[:1], ranks[1])
        expect_lost(job.nodes, ranks[1:], ranks[0])
    finally:
        job.nodes[1].link("up")
    job.expect_complete(ranks)
    job.hold()


@pytest.mark.parametrize(
    ("point", "victim", "how"),
    [
        (f"{_COPY}:after:2", 1, "kill"),
        (f"{_PUSH}:before:2", 0, "kill"),
        (f"{_PUSH}:after:2", 0, "stop"),
        (f"{_SETTLE}:before:2", 1, "stop"),
        (f"{_FETCH}:before:1", 0, "stop"),
        (f"{_FETCH}:before:2", 1, "kill"),
    ],
)
def test_a_rank_is_lost(job: ReplicaJob, point: str, victim: int, how: str) -> None:
    """While it replicates, or restores from memory. The agents stay for the next start."""
    if point.startswith(_FETCH):
        job.hold()
    ranks = job.start(3, points={victim: [f"{point}:{how}"]}, silent_s=2)
    lost = ranks[victim]
    if how == "stop":
        lost.wait_stopped(_LIMIT_S)
    else:
        assert lost.wait(_LIMIT_S) == -signal.SIGKILL
    expect_lost(job.nodes, [ranks[1 - victim]], lost)
    lost.kill()
    lost.wait(_LIMIT_S)
    job.expect_complete(ranks)
    for node in job.nodes[0], job.nodes[1]:
        job.agent(node)


def test_two_jobs_and_a_stranger(job: ReplicaJob, tmp_path: Path) -> None:
    """Another job on the same nodes has agents of its own, which end with it. Someone with another
    token is refused. Neither is noticed by the first job."""
    ranks = job.start(1)
    for rank in ranks:
        rank.wait_for("stays", _LIMIT_S)
    two = job.nodes[0], job.nodes[1]
    before = [[job.agent(node)] for node in two]
    other = ReplicaJob(job.nodes, tmp_path / "other")
    other.finish()
    until(lambda: [agents_of(node.running()) for node in two] == before)
    shm = Path(f"/proc/{before[1][0]}/root/dev/shm")
    (record,) = shm.glob("iobench-*/*/agent.json")
    address = json.loads(record.read_text())["address"]
    stranger = job.nodes[0].start("support.replica_trains:knocks", *address)
    assert stranger.wait(_LIMIT_S) == 0
    assert "wrong token" in stranger.stdout()
    job.leave(ranks)
    assert job.hold() == job.newest


def test_a_node_and_its_partner_are_lost(nodes: Nodes, tmp_path: Path) -> None:
    """Storage has an older step: it is loaded, and a warning names the rank whose bytes are lost.

    Three nodes form a ring: node 2 has the copy of node 1.
    """
    job = ReplicaJob(nodes, tmp_path / "ring", size=3)
    job.hold()
    ranks = job.start(1, points={0: [f"{_PUBLISH}:before:1:hang"]})
    for rank in ranks:
        rank.wait_for("replica 1 complete", _LIMIT_S)
    for rank in ranks:
        rank.kill()
    for node in nodes[1], nodes[2]:
        node.lose_power()
        node.boot()
    nodes.wait(ranks, _LIMIT_S)
    job.expect_complete(ranks)
    assert job.newest == 0
    ranks = job.start(1)
    job.leave(ranks)
    assert [loads(rank)[0] for rank in ranks] == [0, 0, 0]
    assert "step 1 is passed over: no source has the bytes of rank 1" in told(ranks[0])
    job.finish()
