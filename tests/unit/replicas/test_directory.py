"""ReplicaDirectory: what it lists, keeps and removes, the limits of memory, and its command."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

from iobench.errors import ReplicaError, TargetError
from iobench.replicas import directory as module
from iobench.replicas.directory import ReplicaDirectory, Version, remove_unused, replica_directories
from iobench.units import GIB, MIB
from iobench.writers.image import FileImage

Command = Callable[..., "CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this user, which does not exist yet."""
    path = tmp_path / "runtime"
    monkeypatch.setenv("IOBENCH_RUNTIME", str(path))
    monkeypatch.setattr(module, "available_bytes", lambda: None)
    return path


def _taken(job: str = "job", location: str = "/runs/a", keep_s: float = 3600) -> ReplicaDirectory:
    made = ReplicaDirectory.of(job)
    made.take(location=location, keep_s=keep_s)
    return made


def _version(step: int) -> Version:
    return Version(step, step, f".step-{step}.0a1b.iobench-staging")


def _put(to: ReplicaDirectory, step: int, rank: int = 0, size: int = 3 * MIB + 5) -> FileImage:
    data = np.random.default_rng(step).integers(0, 256, size, np.uint8)
    to.new_file(_version(step), rank, size, None)
    to.copy(_version(step), rank, FileImage.of("own", [data[:7], data[7:]]))
    to.complete(_version(step), rank, 2, b"header")
    return FileImage.of("own", [data])


def _steps(found: ReplicaDirectory) -> list[int]:
    return sorted(version.step for version, _, _ in found.listed())


@pytest.mark.parametrize("size", [0, 1, MIB, 3 * MIB + 5])
def test_bytes_that_were_copied(size: int) -> None:
    """They are mapped, and only complete ones are listed. Nobody else can read them."""
    made = _taken()
    written = _put(made, 20, rank=1, size=size)
    made.new_file(_version(30), 0, 5, None)
    assert made.listed() == [(_version(20), 1, 2)]
    mapped = made.image(_version(20), 1)
    assert mapped.size_bytes == size
    assert [bytes(one) for one in mapped.views(0, size)] == [
        bytes(one) for one in written.views(0, size)
    ]
    assert {path.stat().st_mode & 0o077 for path in (made.path, made.path.parent)} == {0}
    made.remove()


def test_versions_that_are_kept() -> None:
    """All others are removed, complete or not."""
    made = _taken()
    for step in (10, 20, 30):
        _put(made, step)
    made.new_file(_version(40), 0, 5, None)
    made.keep(_version(20))
    assert _steps(made) == [20]
    made.keep(None)
    assert _steps(made) == []
    made.remove()
    assert not made.path.exists()


def test_memory_is_counted_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget of the node, /dev/shm, and the memory that is available."""
    made = _taken()
    _put(made, 10, size=4 * MIB)
    with pytest.raises(ReplicaError, match=r"5\.00 MiB more .* budget: 4\.\d\d MiB of 8\.00 MiB"):
        made.new_file(_version(20), 0, 5 * MIB, 8 * MIB)
    monkeypatch.setattr(module, "available_bytes", lambda: GIB + 4 * MIB)
    with pytest.raises(ReplicaError, match=r"do not fit the memory of the node: 1\.\d\d GiB are"):
        made.new_file(_version(20), 0, 5 * MIB, None)
    found = os.statvfs(made.path)
    with pytest.raises(ReplicaError, match=r"do not fit .*: .* are free"):
        made.new_file(_version(20), 0, found.f_blocks * found.f_frsize, None)
    assert _steps(made) == [10]
    assert made.taken_bytes() < 5 * MIB
    made.remove()


def test_files_of_other_jobs(runtime: Path) -> None:
    """Those of this location go at the next start, others after their time, and none in use."""
    used = _taken("used")
    left = _taken("left")
    other = _taken("other", "/runs/b")
    late = _taken("late", "/runs/c", keep_s=-1)
    for one in (left, other, late):
        _put(one, 10)
        one.release()
    own = ReplicaDirectory.of("own")
    remove_unused(own, "/runs/a")
    assert {one.path for one in replica_directories()} == {used.path, other.path}
    assert _steps(other) == [10]
    used.remove()
    assert other.remove_unless_used()
    assert not list((runtime / "replicas").iterdir())


def test_one_process_has_it() -> None:
    """A job that still runs keeps its files, and a second start of it is refused."""
    made = _taken()
    with pytest.raises(TargetError, match="is in use: process"):
        _taken()
    assert not ReplicaDirectory(made.path).remove_unless_used()
    made.release()
    _taken().remove()


def test_status_and_clean(runtime: Path, iobench_inside: Command) -> None:
    """Each job with its memory and its steps; those that run stay."""
    one, two = _taken("one"), _taken("two", "/runs/b")
    _put(one, 500)
    environ = {"IOBENCH_RUNTIME": str(runtime)}
    shown = iobench_inside("replicas", "status", **environ)
    assert re.search(rf"^{one.path.name}  3\.\S+ \w+  500    /runs/a$", shown.stdout, re.MULTILINE)
    assert "2 jobs with replicas" in shown.stdout
    found = json.loads(iobench_inside("replicas", "status", "--format", "json", **environ).stdout)
    assert sorted(job["key"] for job in found["jobs"]) == sorted([one.path.name, two.path.name])
    one.release()
    unknown = iobench_inside("replicas", "clean", "three", **environ)
    assert unknown.returncode == 2
    assert "no job 'three' on this node. Known: " in unknown.stderr
    cleaned = iobench_inside("replicas", "clean", **environ)
    assert cleaned.stdout == f"removed {one.path.name}\n"
    assert f"{two.path.name} is used by a job that runs" in cleaned.stderr
    two.remove()
    assert "replicas of 0 jobs removed" in iobench_inside("replicas", "clean", **environ).stderr
