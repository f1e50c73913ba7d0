"""kill -9 at random moments of a save: for each writer 50 of files and 50 of checkpoints.

`make test` has one writer of each kind of I/O. `make test-all` has all, and as many other moments.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.captured import captured
from support.killed_saves import KilledSaves, killed_saves

from iobench.checkpoint.manifest import MANIFEST
from iobench.units import KIB

QUICK = ("buffered", "odirect", "uring", "hybrid")
"""The page cache, direct blocks by threads and by a ring, and two paths into one file."""

_KILLS = {"write": 25, "stream": 25, "checkpoint": 50}
_SEEDS = pytest.mark.parametrize("seed", [7, pytest.param(8, marks=pytest.mark.exhaustive)])
_SIZE = 1024 * KIB
_LEFT = re.compile(r"\.model\..*\.iobench-part|\.step-\d+\..*\.iobench-staging")

Saves = Callable[[str], KilledSaves]


@pytest.fixture
def saves(make, name, settings, tmp_path, how, seed) -> Iterator[KilledSaves]:
    """Saves by that writer, each of which may be killed."""
    make(tmp_path)
    options = json.loads(settings)
    target, factory = str(tmp_path), "support.fake_cufile:play_gds" if name == "gds" else ""
    with killed_saves(
        name, options, target, how=how, size_bytes=_SIZE, factory=factory, seed=seed
    ) as running:
        yield running


@_SEEDS
@pytest.mark.parametrize("how", ["write", "stream"])
def test_files(saves, names, tmp_path, how: str) -> None:
    """The name has the last file or the one before, complete, and the next save succeeds."""
    saves.save(1)
    held, met, kept, left = 1, Counter[str](), Counter[bool](), set[str]()
    for number in range(2, 2 + _KILLS[how]):
        phase = saves.kill(number)
        left |= _taken_away(tmp_path, names(tmp_path) - {"model"})
        before, held = held, _number(tmp_path / "model", _SIZE)
        assert held in ((number,) if phase == "done" else (before, number)), phase
        met[phase] += 1
        kept[held == number] += 1
        if not number % 10:
            saves.save(held := number + 1000)
            assert _number(tmp_path / "model", _SIZE) == held
    _expect_everywhere(met, kept, _KILLS[how])
    _expect_only_leftovers(left)


@_SEEDS
@pytest.mark.parametrize("how", ["checkpoint"])
def test_checkpoints(saves, names, tmp_path, how: str) -> None:
    """No visible checkpoint is incomplete, and the earlier ones stay."""
    saves.save(1)
    whole, met, kept = {"step-1"}, Counter[str](), Counter[bool]()
    for number in range(2, 2 + _KILLS[how]):
        phase = saves.kill(number)
        seen = {name for name in names(tmp_path) if name.startswith("step-")}
        assert whole <= seen <= whole | {f"step-{number}"}
        kept[len(seen) > len(whole)] += 1
        assert phase != "done" or len(seen) > len(whole)
        whole = seen
        met[phase] += 1
    saves.save(0)
    for name in whole | {"step-0"}:
        _expect_whole(tmp_path / name)
    _expect_everywhere(met, kept, _KILLS[how])
    _expect_only_leftovers(names(tmp_path) - whole - {"step-0"})


def _expect_everywhere(met: Counter[str], kept: Counter[bool], kills: int) -> None:
    """The kills came before and after the publication, and in most phases of the save."""
    assert met.total() == kills
    assert min(kept[True], kept[False]) >= 3
    assert "commit" in met
    assert met["write"] + met["submit"]
    assert len(met) >= 4


def _expect_only_leftovers(others: set[str]) -> None:
    assert others, "no kill left anything: none fell into a save"
    assert all(_LEFT.fullmatch(other) for other in others), others


def _taken_away(directory: Path, left: set[str]) -> set[str]:
    """Remove the files of a kill: a stream reserves space ahead, and many of them fill a disk."""
    for name in left:
        (directory / name).unlink()
    return left


def _expect_whole(directory: Path) -> None:
    number = int(directory.name.removeprefix("step-"))
    assert json.loads((directory / MANIFEST).read_text()) == {"step": number}
    assert _number(directory / "model", _SIZE - _SIZE // 4) == number
    for shard in ("0", "1"):
        assert _number(directory / "shards" / shard, _SIZE // 8) == number


def _number(path: Path, size_bytes: int) -> int:
    """Return the number of the checkpoint that the complete file belongs to."""
    found = np.fromfile(path, dtype=np.uint64)
    assert found.nbytes == size_bytes
    assert (found == found[0]).all(), "a torn file"
    return int(found[0])


_PROBES = """
import os, signal, sys
from iobench.writers import registry
from iobench.writers.file_writer import FileWriter

# It is called after the trial write, with the file still open.
FileWriter._admits_ring = lambda self, meter: os.kill(os.getpid(), signal.SIGKILL)
for name in ("odirect", "uring", "hybrid"):
    child = os.fork()
    if not child:
        answer = registry.make(name).available(sys.argv[1])
        os._exit(0 if not answer.ok else 1)
    _, status = os.waitpid(child, 0)
    print(name, os.WIFSIGNALED(status), status)
"""


def test_while_trying(tmp_path) -> None:
    """`available` that is killed with an open file leaves none: the file has no name here."""
    done = captured([sys.executable, "-c", _PROBES, str(tmp_path)], check=True)
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        [name, "True"] for name in ("odirect", "uring", "hybrid")
    ], done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
