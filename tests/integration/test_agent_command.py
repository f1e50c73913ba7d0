"""`iobench agent status` and `iobench agent stop`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.agents import Node, random_bytes, runtime_directories

from iobench.replicas.protocol import Version
from iobench.units import MIB

Command = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def base() -> Iterator[Path]:
    """Where the agents have their directories."""
    with runtime_directories() as made:
        yield made


def test_status_and_stop(base: Path, iobench_inside: Command) -> None:
    """Each agent with its memory and its steps; stop ends one of them, or all."""
    one = Node(base / "n", token=secrets.token_bytes(32), job="one")
    two = Node(base / "n", token=secrets.token_bytes(32), job="two")
    environ = {"IOBENCH_AGENTS": str(base / "n")}
    one.copy(0, Version(1, 500, "a"), random_bytes(3 * MIB))
    shown = iobench_inside("agent", "status", **environ)
    assert "memory   3.00 MiB in 1 segments\n  steps    500\n" in shown.stdout
    assert "2 memory agents" in shown.stderr
    found = json.loads(iobench_inside("agent", "status", "--format", "json", **environ).stdout)
    assert [agent["key"] for agent in found["agents"]] == ["one", "two"]
    assert [agent["trainers"] for agent in found["agents"]] == [1, 1]
    stopped = iobench_inside("agent", "stop", "one", **environ)
    assert (stopped.stdout, stopped.stderr) == ("stopped one\n", "1 memory agents stopped\n")
    assert (one.record.alive, two.record.alive) == (False, True)
    unknown = iobench_inside("agent", "stop", "three", **environ)
    assert unknown.returncode == 2
    assert "no agent 'three' on this node. Known: two." in unknown.stderr
    assert iobench_inside("agent", "stop", **environ).stdout == "stopped two\n"
    assert not two.record.alive
    for node in (one, two):
        node.own.close()


def test_nothing_runs(base: Path, iobench_inside: Command) -> None:
    """Without agents nothing is made and nothing fails."""
    environ = {"IOBENCH_AGENTS": str(base / "none")}
    assert "0 memory agents" in iobench_inside("agent", "status", **environ).stderr
    assert "0 memory agents stopped" in iobench_inside("agent", "stop", **environ).stderr
    assert not (base / "none").exists()
