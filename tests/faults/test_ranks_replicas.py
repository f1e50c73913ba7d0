"""Attacks on replicas in the memory of nodes: on memory, network, ranks and nodes.

Each start of a job loads the newest step and checks every value, so it finds out what the test
before has left. The replicas stay from test to test.
"""

import signal
import time
from collections.abc import Iterator

import pytest
from support.nodes import Nodes
from support.replica_job import ReplicaJob, loads, outcomes, told
from support.saved_run import expect_lost

pytestmark = pytest.mark.usefixtures("no_process_left")
_LIMIT_S = 60
_REPLICATOR = "iobench.replicas.replicator.Replicator"
_COPY, _SETTLE, _HELD = (f"{_REPLICATOR}.{name}" for name in ("_copied", "_settle", "held"))
_SEND = "iobench.replicas.replicator.Sender.send"
_ARRIVED = "iobench.ranks.wire.Wire.take_into:after"
_PUBLISH = "iobench.checkpoint.ranked.dcp_files.DcpFormat.publish"
_MEMORY = {"replicas": "read"}


@pytest.fixture(scope="module")
def job(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaJob]:
    """A job on nodes 0 and 1, which keep each other's bytes. After a good end nothing is left in
    memory, and the next start reads from storage."""
    made = ReplicaJob(nodes, tmp_path_factory.mktemp("job"))
    yield made
    made.finish()
    assert not any(made.files(node) for node in nodes)
    for rank in made.finish():
        assert loads(rank)[1] == {}


def test_memory_lost_and_wrong_bits_on_the_wire(job) -> None:
    """One node has lost its memory, and what the partner sends arrives damaged: this piece comes
    from storage, with a warning, and the next save has a replica."""
    newest = job.hold()
    assert len(job.files(job.nodes[1])) == 2
    job.nodes[1].lose_power()
    job.nodes[1].boot()
    ranks = job.start(1, points={1: [f"{_ARRIVED}:1:flip"]})
    job.leave(ranks)
    assert loads(ranks[0]) == (newest, _MEMORY, [])
    step, sources, paths = loads(ranks[1])
    assert step == newest
    assert "network" in paths
    assert "is damaged" in sources["replicas"]
    assert sources[str(job.directory)].startswith("read ")
    assert f"step {newest} is read from {job.directory} in part: " in told(ranks[1])
    assert not told(ranks[0])
    assert outcomes(ranks[0]) == outcomes(ranks[1]) == ["complete"]


def test_wrong_bit_in_memory(job) -> None:
    """The bytes come from the partner's memory; a warning says so."""
    newest = job.hold()
    assert job.flip(job.nodes[0]) == 2
    ranks = job.start(1)
    job.leave(ranks)
    assert loads(ranks[0]) == (newest, _MEMORY, ["network"])
    assert loads(ranks[1]) == (newest, _MEMORY, [])
    for saved in (0, 1):
        assert f"the memory of node 0 is not used for rank {saved}: " in told(ranks[0])


def test_memory_full_on_one_node(job) -> None:
    """Nothing is taken beyond the limit. Saves go on without replicas, and all ranks tell it."""
    job.hold()
    ranks = job.start(2, options_of={1: {"memory": "3MiB"}})
    job.leave(ranks)
    for rank in ranks:
        assert outcomes(rank) == ["failed", "failed"], rank.stdout()
        assert f"step {job.newest} has no replica: rank 1 (host " in told(ranks[0])
        assert "do not fit the budget" in told(rank)


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


def test_node_replaced_and_numbers_exchanged(job) -> None:
    """Rank 0 comes to a new node, and reads from the memory of the other one a step that is not on
    storage."""
    step = _only_in_memory(job)
    job.nodes[1].lose_power()
    job.nodes[1].boot()
    ranks = job.start(1, order=(1, 0))
    job.leave(ranks)
    assert loads(ranks[0]) == (step, _MEMORY, ["network"])
    assert loads(ranks[1]) == (step, _MEMORY, [])
    assert outcomes(ranks[0]) == outcomes(ranks[1]) == ["complete"]


def test_all_memory_damaged(job) -> None:
    """The step that only memory had is lost; all ranks load the one before it, with a warning."""
    step = _only_in_memory(job)
    damaged = [file for node in job.nodes for file in job.files(node) if f"-{step}-" in str(file)]
    assert len(damaged) == 4
    for file in damaged:
        file.write_bytes(bytes(file.stat().st_size))
    ranks = job.start(1)
    job.leave(ranks)
    assert [loads(rank)[0] for rank in ranks] == [step - 1, step - 1]
    assert "the memory of node 1 is not used for rank 1: " in told(ranks[0])
    assert outcomes(ranks[0]) == outcomes(ranks[1]) == ["complete"]


def test_short_partition_during_a_transfer(job) -> None:
    """Training goes on when the node is back, and so do replicas."""
    ranks = job.start(2, options={"rate": "1MB"}, points={0: [f"{_SEND}:before:1:note"]})
    ranks[0].wait_for("Sender.send", _LIMIT_S)
    job.nodes[1].link("down")
    time.sleep(0.5)
    job.nodes[1].link("up")
    job.leave(ranks)
    assert [outcomes(rank)[-1] for rank in ranks] == ["complete", "complete"]


def test_long_partition_during_a_transfer(job) -> None:
    """Both sides end, each with the name of the other one; the next start goes on."""
    options = {"rate": "1MB"}
    ranks = job.start(2, options=options, points={0: [f"{_SEND}:before:1:note"]}, silent_s=2)
    ranks[0].wait_for("Sender.send", _LIMIT_S)
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
        (f"{_SEND}:before:2", 0, "kill"),
        (f"{_SEND}:after:2", 0, "stop"),
        (f"{_SETTLE}:before:2", 1, "stop"),
        (f"{_HELD}:before:1", 0, "stop"),
        (f"{_HELD}:after:1", 1, "kill"),
    ],
)
def test_a_rank_is_lost(job, point: str, victim: int, how: str) -> None:
    """While it replicates, or restores from memory. The next start has what all ranks have."""
    if point.startswith(_HELD):
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
    assert job.files(job.nodes[0])
    assert job.files(job.nodes[1])


def test_two_jobs(job, tmp_path) -> None:
    """Another job on the same nodes has files of its own, which end with it."""
    job.hold()
    two = job.nodes[0], job.nodes[1]
    ranks = job.start(1)
    for rank in ranks:
        rank.wait_for("stays", _LIMIT_S)
    before = [job.files(node) for node in two]
    other = ReplicaJob(job.nodes, tmp_path / "other")
    other.finish()
    assert [job.files(node) for node in two] == before
    job.leave(ranks)
    assert job.hold() == job.newest


def test_a_node_and_its_partner_are_lost(nodes, tmp_path) -> None:
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
