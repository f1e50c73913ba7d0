"""A rank of a job on several nodes is lost: the others end soon, and name it."""

import contextlib
import json
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.nodes import Node, Nodes, Process

pytestmark = pytest.mark.usefixtures("no_process_left")
_SILENT_S = 2.0
_DEADLINE_S = 60.0
_KILLED = -signal.SIGKILL
_LOST = 3
"""Exit code of a rank that got a RankError."""


def _start(
    nodes: Nodes,
    size: int,
    *,
    rounds: int = 1000,
    pause_s: float = 0.01,
    how: str = "",
    deadline_s: float = _DEADLINE_S,
    points: dict[int, Sequence[str]] | None = None,
) -> list[Process]:
    """Start ranks on as many nodes, which gather again and again."""
    return nodes.ranks(
        "support.rank_scripts:gathers",
        _SILENT_S,
        deadline_s,
        rounds,
        pause_s,
        how,
        order=range(size),
        points=points,
    )


def _expect_lost(nodes: Nodes, survivors: Sequence[Process], lost: Process, *words: str) -> None:
    """The survivors end with a RankError that names the lost rank, its host and the phase."""
    assert nodes.wait(survivors, _DEADLINE_S / 2) == [_LOST] * len(survivors), [
        rank.stderr() for rank in survivors
    ]
    for rank in survivors:
        last = rank.stdout().splitlines()[-1]
        found = re.fullmatch(r"lost \[(.*)\] after ([0-9.]+) s: (.*)", last)
        assert found, last
        assert found[1] == str(lost.rank), last
        assert f"rank {lost.rank} (" in found[3], last
        assert lost.node.host in found[3], last
        for word in words:
            assert word in found[3], last


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_lost_at_any_time(nodes, victim: int, how: str) -> None:
    """It is killed or stopped while the ranks gather; rank 0 has the hub."""
    ranks = _start(nodes, 4)
    for rank in ranks:
        rank.wait_for("round 3", 30)
    lost = ranks[victim]
    lost.kill() if how == "kill" else lost.stop()
    _expect_lost(nodes, [rank for rank in ranks if rank is not lost], lost, "round")
    lost.kill()
    assert lost.wait(30) == _KILLED


@pytest.mark.parametrize(
    "point",
    [
        "control.Control.all_gather:before:3:kill",
        "control.Control.all_gather:after:3:kill",
        "calls.Member._send:before:5:stop",
        "calls.Member._send:after:5:kill",
    ],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_lost_at_a_point(nodes, victim: int, point: str) -> None:
    """Before, in and after a gather."""
    ranks = _start(nodes, 2, points={victim: [f"iobench.ranks.{point}"]})
    lost = ranks[victim]
    lost.wait_stopped(30) if point.endswith("stop") else lost.wait(30)
    _expect_lost(nodes, [rank for rank in ranks if rank is not lost], lost, "round")
    lost.kill()
    assert lost.wait(30) == _KILLED


def test_a_late_rank_is_told(nodes) -> None:
    """It connects after another one was lost: rank 0 waits for it, and tells why the job ends."""
    points = {
        1: ["iobench.ranks.control.Control.all_gather:before:1:kill"],
        2: ["iobench.ranks.control._connected:before:1:stop"],
    }
    ranks = _start(nodes, 3, deadline_s=20, points=points)
    _, lost, late = ranks
    late.wait_stopped(30)
    assert lost.wait(30) == _KILLED
    time.sleep(0.5)  # without the wait rank 0 ends now
    late.resume()
    _expect_lost(nodes, [ranks[0], late], lost, "started")


@pytest.mark.parametrize("victim", [0, 3])
def test_partition(nodes, victim: int) -> None:
    """A node is cut off: both sides end, and neither waits for TCP to give up."""
    ranks = _start(nodes, 4)
    for rank in ranks:
        rank.wait_for("round 3", 30)
    lost = ranks[victim]
    lost.node.link("down")
    _expect_lost(nodes, [rank for rank in ranks if rank is not lost], lost, "round")
    assert lost.wait(30) == _LOST
    assert "lost [" in lost.stdout()


@pytest.mark.parametrize("victim", [0, 1])
def test_children_of_a_lost_rank(nodes, victim: int) -> None:
    """A killed rank is known at once, also if a child that it has forked, such as a worker of a
    data loader, lives on."""
    ranks = _start(nodes, 2, how="forked", pause_s=0.1)
    for rank in ranks:
        rank.wait_for("round 3", 30)
    lost, other = ranks[victim], ranks[1 - victim]
    lost.kill()
    _expect_lost(nodes, [other], lost, "ended")
    nodes.kill_all()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("raise", 1, "wrong shape"),
        ("exit", 0, "ended"),
        ("late", None, "did not reach phase 'round 2' within 1 s"),
    ],
)
def test_a_rank_misbehaves(nodes, victim, what, code, said) -> None:
    """It raises, ends, or does not come to the next call before its deadline."""
    ranks = _start(nodes, 3, how=f"{what}:{victim}:2")
    lost = ranks[victim]
    _expect_lost(nodes, [rank for rank in ranks if rank is not lost], lost, said)
    if code is None:
        lost.kill()
    assert lost.wait(30) == (_KILLED if code is None else code)


def test_all_are_stopped_and_resumed(nodes) -> None:
    """A job that was suspended for longer than a rank may be silent goes on."""
    ranks = _start(nodes, 3, rounds=200, pause_s=0.02)
    for rank in ranks:
        rank.wait_for("round 3", 30)
    for rank in ranks:
        rank.stop()
    time.sleep(1.5 * _SILENT_S)
    for rank in ranks:
        rank.resume()
    assert nodes.wait(ranks, 60) == [0, 0, 0], [rank.stdout() for rank in ranks]


def test_two_jobs_at_one_address(nodes, tmp_path) -> None:
    """The ranks of the second job end with a message; the first job goes on."""
    environ = {"IOBENCH_STORE": f"tcp://{nodes[0].address}:20001"}
    other = {**environ, "IOBENCH_TOKEN": "another secret"}
    script = "support.rank_scripts:gathers"
    first = nodes.ranks(script, _SILENT_S, 20, 300, 0.01, order=[0, 1], environ=environ)
    for rank in first:
        rank.wait_for("round 1", 30)
    second = nodes.ranks(script, _SILENT_S, 2, 3, 0.01, order=[0, 2], environ=other)
    assert 0 not in nodes.wait(second, 30), [rank.stdout() for rank in second]
    assert "cannot listen on" in second[0].stderr()
    assert "rank 0 cannot be reached" in second[1].stdout()
    assert nodes.wait(first, 60) == [0, 0], [rank.stdout() for rank in first]


def test_address_of_an_earlier_start(nodes, tmp_path) -> None:
    """A killed start leaves its address in the shared directory. A rank of the next start, which
    has the same name and whose rank 0 is late, reads the new address; no file is left then."""

    def start(point: str, deadline_s: float) -> list[Process]:
        return nodes.ranks(
            "support.rank_scripts:gathers",
            *(_SILENT_S, deadline_s, 3, 0.01),
            order=[0, 1],
            environ={"IOBENCH_STORE": str(tmp_path), "IOBENCH_TOKEN": ""},
            job="same",
            port=29400,
            points={0: [f"iobench.ranks.{point}"]},
        )

    assert nodes.wait(start("control.Control.all_gather:before:1:kill", 2), 30) == [_KILLED, _LOST]
    assert list(tmp_path.iterdir())
    ranks = start("control.meet:before:1:slow", 20)
    assert nodes.wait(ranks, 30) == [0, 0], [rank.stdout() + rank.stderr() for rank in ranks]
    assert not list(tmp_path.iterdir())


def test_ranks_meet_at_the_store_of_the_trainer(nodes) -> None:
    """Process groups are initialized: nothing has to be set, also without a shared directory."""
    ranks = nodes.ranks("support.rank_scripts:meets_by_groups", order=[0, 1])
    addresses = [address for _, address in _places(nodes, ranks)]
    assert addresses == [nodes[0].address, nodes[1].address]


def _places(nodes: Nodes, ranks: Sequence[Process]) -> list[Any]:
    assert nodes.wait(ranks, 60) == [0] * len(ranks), [r.stdout() + r.stderr() for r in ranks]
    found = [json.loads(rank.stdout()) for rank in ranks]
    assert all(one == found[0] for one in found)
    places: list[Any] = found[0]
    return places


def test_a_launcher_that_names_no_nodes(nodes, tmp_path) -> None:
    """Ranks that know only their number and MASTER_ADDR: they meet, and learn who shares a node."""
    unset = ["LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"]
    script = "support.rank_scripts:meets"
    ranks = nodes.ranks(script, str(tmp_path), 30, *unset, order=[0, 1], per_node=2)
    places = _places(nodes, ranks)
    assert [place for place, _ in places] == [
        [0, 0, 2, 0, 2, True],
        [1, 1, 2, 0, 2, True],
        [2, 0, 2, 1, 2, True],
        [3, 1, 2, 1, 2, True],
    ]
    assert [address for _, address in places] == [nodes[number].address for number in (0, 0, 1, 1)]


@contextlib.contextmanager
def _own_name_is_the_loopback(node: Node, file: Path) -> Iterator[None]:
    """Debian's /etc/hosts has the host's own name at 127.0.1.1."""
    hosts = node.run("cat", "/etc/hosts").replace(f"{node.address} {node.host}", "")
    file.write_text(f"{hosts}\n127.0.1.1 {node.host}\n")
    node.run("mount", "--bind", file, "/etc/hosts")
    try:
        yield
    finally:
        node.run("umount", "/etc/hosts")


def test_a_master_whose_name_is_the_loopback(nodes, tmp_path) -> None:
    """Rank 0 publishes an address that other nodes can reach, or says what to set."""
    script, environ = "support.rank_scripts:meets", {"MASTER_ADDR": "node0"}
    gathers = "support.rank_scripts:gathers", 30, 30, 1, 0
    with _own_name_is_the_loopback(nodes[0], tmp_path / "hosts"):
        fixed = {**environ, "IOBENCH_STORE": "tcp://node0:20001"}
        ranks = nodes.ranks(*gathers, order=[0, 1], environ=fixed)
        assert nodes.wait(ranks, 60) == [0, 0], [rank.stdout() for rank in ranks]
        store = {**environ, "IOBENCH_STORE": str(tmp_path)}
        ranks = nodes.ranks(script, None, 30, order=[0, 1], environ=store)
        assert [at for _, at in _places(nodes, ranks)] == [nodes[0].address, nodes[1].address]
        bridge = ["link", "add", "docker0", "type", "veth", "peer", "name", "container0"]
        nodes[0].run("ip", *bridge)
        nodes[0].run("ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
        try:
            ranks = nodes.ranks(script, None, 2, order=[0, 1], environ=store)
            assert nodes.wait(ranks, 30) == [_LOST, _LOST]
            assert "other nodes cannot reach lo (127.0." in ranks[0].stdout()
            assert "set GLOO_SOCKET_IFNAME" in ranks[0].stdout()
            chosen = {**store, "GLOO_SOCKET_IFNAME": "eth0"}
            _places(nodes, nodes.ranks(script, None, 30, order=[0, 1], environ=chosen))
        finally:
            nodes[0].run("ip", "link", "del", "docker0")
