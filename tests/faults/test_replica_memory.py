"""Memory for replicas under the limit of a real control group."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.memory_group import memory_group

from iobench.units import GIB, MIB

pytestmark = pytest.mark.root

_TAKER = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from iobench.replicas.segment import NodeMemory
from iobench.errors import ReplicaError
fd, memory, taken = os.memfd_create("replica"), NodeMemory(), 0
step = int(sys.argv[2])
try:
    while True:
        memory.grow(fd, taken, taken + step)
        taken += step
except ReplicaError as error:
    print(taken, memory.taken_bytes, os.fstat(fd).st_size, os.fstat(fd).st_blocks * 512, error)
"""


def test_a_limit_of_memory() -> None:
    """The agent takes what the group leaves besides 1 GiB, refuses more, and is not killed."""
    with memory_group(GIB + 192 * MIB) as group:
        command = [sys.executable, "-c", _TAKER, group.path, str(32 * MIB)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *sizes, error = done.stdout.split(maxsplit=4)
    taken = int(sizes[0])
    assert 32 * MIB <= taken <= 192 * MIB  # the interpreter and what it imports take the rest
    assert sizes == [str(taken)] * 4  # nothing of the last request
    assert error.startswith("32.00 MiB more for a replica do not fit the memory of the node: ")
