"""The nodes of the tests: nothing of them is left, however their user ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = str(Path(__file__).parents[1])


_USER = """
import os, pathlib, sys, time
from support.nodes import open_nodes
with open_nodes(2, directory=pathlib.Path(sys.argv[1])) as nodes:
    shell = ["sh", "-c", "setsid sleep 60 & echo ready; exec sleep 60"]
    process = nodes[1].start("os:execvp", "sh", shell)
    process.wait_for("ready", 30)
    while len(found := nodes[1].running()) < 2:  # one that becomes another program is not seen
        time.sleep(0.01)
    print(nodes[0].pid, nodes[1].pid, *found, flush=True)
    sys.stdin.read()
    1 / int(sys.argv[2])
"""


@pytest.mark.parametrize("end", ["failure", "kill"])
def test_nothing_is_left(end: str, tmp_path) -> None:
    """When the user of nodes fails or is killed, all of their processes end."""
    with subprocess.Popen(
        [sys.executable, "-c", _USER, str(tmp_path), "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([_TESTS, *sys.path])},
    ) as user:
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
