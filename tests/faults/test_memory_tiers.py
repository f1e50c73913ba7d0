"""Memory tiers, and memory for replicas, under limits of control groups and of tmpfs, and after
kill -9."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captured import captured
from support.control_groups import control_group

from iobench import Checkpointer, Memory
from iobench.units import GIB, MIB

pytestmark = pytest.mark.root

_SAVER = """
import os, sys, threading
from pathlib import Path
group, limit, directory, size = sys.argv[1:]
Path(group, "cgroup.procs").write_text(str(os.getpid()))
import torch
from iobench import Checkpointer, Memory
from iobench.writers.buffered import BufferedWriter

class Gated(BufferedWriter):
    gate = threading.Event()
    def write_many(self, *given, **options):
        self.gate.wait()
        return super().write_many(*given, **options)

def state(step):
    return {"w": torch.full((int(size) // 4,), float(step))}

def until_full(step):
    while True:
        save = ckpt.save_async(state(step), step)
        if save.status == "skipped":
            return saves
        saves.append(save)
        step += 1

used = "memory.usage_in_bytes" if limit == "memory.limit_in_bytes" else "memory.current"
ckpt = Checkpointer(directory, writer=Gated(), on_full="skip",
                    tiers=[Memory("256MiB"), Memory("8GiB", path="/dev/shm")])
saves = [ckpt.save_async(state(0), 0), ckpt.save_async(state(1), 1)]
# About 100 MiB are left to others, and the state itself takes as much as a snapshot.
Path(group, limit).write_text(str(int(Path(group, used).read_text()) + 270 * 2**20))
lowered = len(until_full(2))
Path(group, limit).write_text(str(2**30))
raised = len(until_full(100))
print(lowered, raised, len({copy.tier for save in saves for copy in save.copies}), flush=True)
Gated.gate.set()
ckpt.wait()
for save in saves:
    found = ckpt.load(save.step)["w"]
    assert save.status == "committed" and found.min() == found.max() == save.step, save
    del found  # two states at once are more than the group leaves
print(ckpt.steps() == [save.step for save in saves])
"""

_KILLED = """
import sys, threading
import torch
from iobench import Checkpointer, Memory
from iobench.writers.buffered import BufferedWriter

class Stuck(BufferedWriter):
    def write_many(self, *given, **options):
        threading.Event().wait()

ckpt = Checkpointer(sys.argv[1], writer=Stuck(), tiers=[Memory("40MiB", path=sys.argv[2])])
for step in range(4):
    ckpt.save_async({"w": torch.full((2_000_000,), float(step))}, step)
print("saved", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def group() -> Iterator[tuple[Path, str]]:
    """A control group of either version, and the name of its limit of memory."""
    with control_group(GIB) as made:
        yield made.path, made.limit_file


def test_a_limit_of_memory_that_is_lowered_and_raised(group, tmp_path) -> None:
    """Snapshots take what the group leaves, and no more: nobody is killed, no byte is wrong."""
    command = [sys.executable, "-c", _SAVER, *map(str, group), tmp_path / "run", str(48 * MIB)]
    done = captured(command)
    assert done.returncode == 0, done.stderr
    counts, same = done.stdout.splitlines()
    lowered, raised, tiers = map(int, counts.split())
    assert 2 < lowered < 6
    assert raised > lowered + 3
    assert tiers == 2  # DRAM and tmpfs
    assert same == "True"


def _used_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def test_killed(new_filesystem, tmp_path) -> None:
    """The memory is free, and the tmpfs is empty, at once: also if it survives a container."""
    memory = new_filesystem("tmpfs", 64 * MIB)
    saver = subprocess.Popen(
        [sys.executable, "-c", _KILLED, tmp_path / "run", memory], stdout=subprocess.PIPE
    )
    try:
        assert saver.stdout.readline() == b"saved\n"
        assert _used_bytes(memory) >= 4 * 8_000_000
        assert list(memory.iterdir()) == []
    finally:
        saver.send_signal(signal.SIGKILL)
        saver.wait()
        saver.stdout.close()
    assert _used_bytes(memory) == 0
    with Checkpointer(tmp_path / "run", tiers=[Memory("40MiB", path=memory)]) as ckpt:
        assert ckpt.latest() is None
        ckpt.save_async({"w": torch.zeros(2_000_000)}, 1)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".iobench-lock", "step-1"}


def test_tmpfs_that_others_fill(new_filesystem, tmp_path) -> None:
    """Its free bytes count, whatever size was given: the rest is in the next tier."""
    small = new_filesystem("tmpfs", 24 * MIB)
    tiers = [Memory("1GiB", path=small), Memory("64MiB")]
    state: dict[str, Any] = {"w": torch.ones(2_000_000)}  # 7.6 MiB
    with Checkpointer(tmp_path / "run", tiers=tiers) as ckpt:
        ckpt.prepare(state, wait=True)
        assert [one.free_bytes // 8_000_000 for one in ckpt.memory] == [3, 8]
    (small / "file").write_bytes(bytes(20 * MIB))
    with Checkpointer(tmp_path / "run", tiers=tiers) as ckpt:
        save = ckpt.save_async(state, 1)
        assert [copy.tier for copy in save.copies][:1] == ["memory"]
        ckpt.wait()
        assert torch.equal(ckpt.load()["w"], state["w"])


def test_reserved_huge_pages(tmp_path) -> None:
    """Slots in hugetlbfs; the pages that are free count."""
    pool = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
    try:
        before = int((pool / "nr_hugepages").read_text())
        (pool / "nr_hugepages").write_text(str(before + 12))
        mount = tmp_path / "huge"
        mount.mkdir()
        made = captured(["mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "none", mount])
    except OSError as error:
        pytest.skip(f"no huge pages can be reserved here: {error}")
    try:
        free = int((pool / "free_hugepages").read_text())
        if made.returncode or free < 12:
            pytest.skip(f"no huge pages can be reserved here: {made.stderr.strip()} {free} free")
        state = {"w": torch.arange(1_900_000, dtype=torch.float32)}  # 7.2 MiB: 4 pages
        tiers = [Memory("1GiB", path=mount), Memory("8MiB")]
        with Checkpointer(tmp_path / "run", tiers=tiers) as ckpt:
            ckpt.prepare(state, wait=True)
            huge = ckpt.memory[0]
            assert huge.free_bytes == free * 2 * MIB - free % 4 * 2 * MIB
            save = ckpt.save_async(state, 1)
            assert save.copies[0].tier == f"memory of {mount}"
            ckpt.wait()
            assert torch.equal(ckpt.load()["w"], state["w"])
        assert int((pool / "free_hugepages").read_text()) == free
    finally:
        subprocess.run(["umount", mount], check=False, capture_output=True)
        (pool / "nr_hugepages").write_text(str(before))


_TAKER = """
import os, sys
from pathlib import Path
from iobench.errors import ReplicaError
from iobench.replicas.directory import ReplicaDirectory
from iobench.replicas.directory import Version
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
        with control_group(GIB + 192 * MIB) as group:
            command = [sys.executable, "-c", _TAKER, group.path, str(32 * MIB), str(directory)]
            done = captured(command)
    finally:
        shutil.rmtree(directory)
    assert done.returncode == 0, done.stderr
    taken, counted, error = done.stdout.split(maxsplit=2)
    assert 32 * MIB <= int(taken) <= 192 * MIB  # the process takes the rest
    assert counted == taken  # nothing of the last request
    assert error.startswith("32.00 MiB more for a replica do not fit the memory of the node: ")
