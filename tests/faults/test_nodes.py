"""The nodes of the tests: a process in one is apart from the others, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.nodes import Nodes, open_nodes

_TESTS = str(Path(__file__).parents[1])


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with open_nodes(2, directory=tmp_path_factory.mktemp("nodes")) as made:
        yield made


def test_ranks_have_torchruns_variables(nodes: Nodes) -> None:
    """Ranks are numbered over the nodes in the order given; every node has a host name."""
    ranks = nodes.ranks("support.node_scripts:show", per_node=2, order=[1, 0])
    assert nodes.wait(ranks, 30) == [0] * 4, [rank.stderr() for rank in ranks]
    assert [rank.stdout().split() for rank in ranks] == [
        ["node1", "0", "0", "0", "4", "2"],
        ["node1", "1", "1", "0", "4", "2"],
        ["node0", "2", "0", "1", "4", "2"],
        ["node0", "3", "1", "1", "4", "2"],
    ]


def test_partition(nodes: Nodes) -> None:
    """A node is reached by its name, but not while its link is down."""

    def reached() -> bool:
        process = nodes[0].start("support.node_scripts:reach", "node1")
        process.wait(30)
        return "reached" in process.stdout() + process.stderr()

    assert reached()
    nodes[1].link("down")
    assert not reached()
    nodes[1].link("up")
    until_s = time.monotonic() + 30  # the kernel may still have the address as unreachable
    while not reached():
        assert time.monotonic() < until_s


def test_shape(nodes: Nodes) -> None:
    """The limit of a link is that of the kernel's token bucket, and is removed again."""
    nodes[0].shape(12_500_000)
    assert "tbf" in (shown := nodes[0].run("tc", "qdisc", "show", "dev", "eth0"))
    assert "rate 100Mbit" in shown
    nodes[0].unshape()
    assert "tbf" not in nodes[0].run("tc", "qdisc", "show", "dev", "eth0")


def test_signals(nodes: Nodes) -> None:
    """Processes are stopped, resumed and killed; exit codes and output are kept."""
    process = nodes[0].start("support.node_scripts:listen", 60)
    process.wait_for("ready", 30)
    process.stop()
    process.wait_stopped(30)
    process.resume()
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    orphans = nodes[0].running()
    (line,) = orphans.values()
    assert line.endswith("sleep 60")  # or that of setsid, which becomes it
    os.kill(*orphans, signal.SIGKILL)
    command = nodes[0].start(["sh", "-c", "echo said; echo wrong >&2; exit 3"])
    assert command.wait(30) == 3
    assert (command.stdout(), command.stderr()) == ("said\n", "wrong\n")


@pytest.mark.parametrize(
    ("point", "code", "printed"),
    [
        ("iobench.units.parse_size:before", -9, 0),
        ("iobench.units.parse_size:after:2", -9, 1),
        ("iobench.units.parse_size:before:3:full", 1, 2),
        ("iobench.units.parse_size:before:4", 0, 3),
        ("iobench.units.no_such:before", 1, 0),
    ],
)
def test_kill_points(nodes: Nodes, point: str, code: int, printed: int) -> None:
    """A point acts at its call, and not without a function of that name."""
    process = nodes[0].start("support.node_scripts:run_points", points=[point])
    assert process.wait(30) == code, process.stderr()
    assert process.stdout() == "65536\n" * printed


def test_power_loss(nodes: Nodes) -> None:
    """A node without power has no process and an empty /dev/shm when it is back."""
    nodes[1].run("touch", "/dev/shm/segment")
    process = nodes[1].start("support.node_scripts:listen", 60)
    process.wait_for("ready", 30)
    nodes[1].lose_power()
    assert process.wait(30) == -signal.SIGKILL
    nodes[1].boot()
    assert nodes[1].running() == {}
    assert nodes[1].run("ls", "/dev/shm") == ""
    reached = nodes[0].start("support.node_scripts:reach", "node1")
    assert reached.wait(30) == 0
    assert "reached" in reached.stdout()


_USER = """
import os, pathlib, sys
from support.nodes import open_nodes
with open_nodes(2, directory=pathlib.Path(sys.argv[1])) as nodes:
    process = nodes[1].start("support.node_scripts:listen", 60)
    process.wait_for("ready", 30)
    print(nodes[0].pid, nodes[1].pid, *nodes[1].running(), flush=True)
    sys.stdin.read()
    1 / int(sys.argv[2])
"""


@pytest.mark.parametrize("end", ["failure", "kill"])
def test_nothing_is_left(nodes: Nodes, end: str, tmp_path: Path) -> None:
    """When the user of nodes fails or is killed, all of their processes end."""
    with subprocess.Popen(
        [sys.executable, "-c", _USER, str(tmp_path), "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([_TESTS, *sys.path])},
    ) as user:
        assert user.stdin is not None
        assert user.stdout is not None
        pids = [int(word) for word in user.stdout.readline().split()]
        assert len(pids) == 4  # two holders, a process, and its child
        descriptors = [os.pidfd_open(pid) for pid in pids]
        if end == "kill":
            user.kill()
        user.stdin.close()
        user.wait(60)
        for descriptor in descriptors:
            _await_end(descriptor)


def _await_end(descriptor: int) -> None:
    """Wait for the end of a process, and close its pidfd."""
    import select

    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(30_000), "the process was left"
    finally:
        os.close(descriptor)
