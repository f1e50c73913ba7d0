"""Memory for replicas under the limit of a real control group."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.memory_group import memory_group

from iobench.units import GIB, MIB

pytestmark = pytest.mark.root

_TAKER = """
import os, sys
from pathlib import Path
from iobench.errors import ReplicaError
from iobench.replicas.directory import ReplicaDirectory
from iobench.replicas.recovery import Version
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))  # what was imported counts elsewhere
directory, step, taken = ReplicaDirectory(Path(sys.argv[3])), int(sys.argv[2]), 0
try:
    while True:
        directory.new_file(Version(1, 1, "a"), taken // step, step, None)
        taken += step
except ReplicaError as error:
    print(taken, directory.taken_bytes(), error)
"""


def test_a_limit_of_memory() -> None:
    """Replicas take what the group leaves besides 1 GiB, more is refused, and nothing is killed."""
    directory = Path(tempfile.mkdtemp(prefix="iobench-test-", dir="/dev/shm"))
    try:
        with memory_group(GIB + 192 * MIB) as group:
            command = [sys.executable, "-c", _TAKER, group.path, str(32 * MIB), str(directory)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(directory)
    assert done.returncode == 0, done.stderr
    taken, counted, error = done.stdout.split(maxsplit=2)
    assert 32 * MIB <= int(taken) <= 192 * MIB  # the process takes the rest
    assert counted == taken  # nothing of the last request
    assert error.startswith("32.00 MiB more for a replica do not fit the memory of the node: ")
