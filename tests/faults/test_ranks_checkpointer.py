"""A rank is lost while all ranks save or restore: the newest checkpoint stays complete."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.nodes import Nodes, Process, open_nodes
from support.rank_kills import PRELOAD
from support.train_scripts import newest_checked

_LOST, _KILLED = 3, -signal.SIGKILL
_LIMIT_S = 60
_TRAINS = "support.train_scripts:trains"
_SAVES = "iobench.dist.saves"

_POINTS = {
    "opening": ("iobench.dist.ranked.RankedCheckpointer._lead:after:1", 1),
    "load": ("iobench.dist.load.pieces.read_pieces:before:1", 1),
    "plan": ("iobench.dist.saves.planning.scattered:before:1", 1),
    "snapshot": ("iobench.checkpoint.checkpointer.copy_into:before:2", 2),
    "write": (f"{_SAVES}.part_writer.PartWriter.write:before:2", 2),
    "part manifest": (f"{_SAVES}.part.Part.to_json:before:2", 2),
    "vote": (f"{_SAVES}.part_writer.PartWriter.write:after:2", 2),
    "voted": (f"{_SAVES}.committer.RankCommitter._vote:after:2", 2),
}
"""Points of every rank, and the step that the job saves there."""

_LEADS = {
    "looks at parts": f"{_SAVES}.assembly.Assembly._part:before:4",
    "manifest": "iobench.checkpoint.staged.StagedCheckpoint._write_manifest:before:2",
    "before rename": "iobench.checkpoint.staged.StagedCheckpoint._write_manifest:after:2",
    "after rename": "iobench.checkpoint.staged.StagedCheckpoint.publish:after:2",
    "retention": "iobench.checkpoint.ledger.Ledger.committed:before:2",
}
"""Points of rank 0 alone."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with open_nodes(3, directory=tmp_path_factory.mktemp("nodes"), preload=PRELOAD) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_process_left(nodes: Nodes) -> Iterator[None]:
    yield
    left = [node.running() for node in nodes]
    nodes.kill_all()
    assert not any(left), left


@pytest.fixture(scope="module")
def saved(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which three ranks have saved step 0."""
    directory = tmp_path_factory.mktemp("saved") / "run"
    _expect_done(nodes, _start(nodes, directory, saves=1))
    return directory


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved`."""
    return shutil.copytree(saved, tmp_path / "run")


def _start(
    nodes: Nodes,
    directory: Path,
    *,
    saves: int = 3,
    how: str = "wait",
    order: Sequence[int] = (0, 1, 2),
    points: dict[int, list[str]] | None = None,
    **options: Any,
) -> list[Process]:
    return nodes.ranks(
        _TRAINS, str(directory), saves, 0.0, how, order=order, points=points, **options
    )


def _expect_done(nodes: Nodes, ranks: Sequence[Process]) -> None:
    codes = nodes.wait(ranks, _LIMIT_S)
    assert codes == [0] * len(ranks), [rank.stdout() + rank.stderr() for rank in ranks]


def _expect_lost(nodes: Nodes, survivors: Sequence[Process], lost: Process) -> None:
    """The survivors have ended with the name of the lost rank and its host."""
    nodes.wait(survivors, _LIMIT_S)
    for rank in survivors:
        last = rank.stdout().splitlines()[-1]
        shown = f"{last}\n{rank.stderr()}"
        assert rank.code == _LOST, shown
        assert re.match(rf"lost \[{lost.rank}\] ", last), shown
        assert f"host {lost.node.host}" in last, shown


def _expect_usable(nodes: Nodes, directory: Path, at_least: int) -> None:
    """The newest checkpoint is complete. A start with other rank numbers continues from it, and
    leaves nothing but checkpoints."""
    newest = newest_checked(directory)
    assert newest >= at_least
    ranks = _start(nodes, directory, saves=2, order=(2, 0, 1))
    _expect_done(nodes, ranks)
    assert f"loaded {newest}\n" in ranks[0].stdout()
    assert newest_checked(directory) == newest + 2
    assert set(os.listdir(directory)) == {
        ".iobench-lock",
        f"step-{newest + 1}",
        f"step-{newest + 2}",
    }


def _fault(nodes: Nodes, run: Path, point: str, victim: int, how: str) -> None:
    ranks = _start(nodes, run, points={victim: [f"{point}:{how}"]})
    lost = ranks[victim]
    lost.wait_stopped(_LIMIT_S) if how == "stop" else lost.wait(_LIMIT_S)
    _expect_lost(nodes, [rank for rank in ranks if rank is not lost], lost)
    lost.kill()
    assert lost.wait(_LIMIT_S) == _KILLED


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", _POINTS)
def test_killed(nodes: Nodes, run: Path, phase: str, victim: int) -> None:
    """kill -9 of a rank in each phase."""
    point, step = _POINTS[phase]
    _fault(nodes, run, point, victim, "kill")
    _expect_usable(nodes, run, step - 1)


@pytest.mark.parametrize("phase", _LEADS)
def test_rank_0_killed(nodes: Nodes, run: Path, phase: str) -> None:
    """kill -9 of rank 0 while it commits step 2."""
    _fault(nodes, run, _LEADS[phase], 0, "kill")
    _expect_usable(nodes, run, 2 if phase in ("after rename", "retention") else 1)


@pytest.mark.parametrize(
    ("phase", "victim"), [("write", 0), ("write", 2), ("voted", 1), ("before rename", 0)]
)
def test_stopped(nodes: Nodes, run: Path, phase: str, victim: int) -> None:
    """SIGSTOP: the rank is silent, and its connection stays."""
    _fault(nodes, run, _LEADS.get(phase) or _POINTS[phase][0], victim, "stop")
    _expect_usable(nodes, run, 1)


def test_a_rank_is_lost_after_its_vote(nodes: Nodes, run: Path) -> None:
    """Rank 0 has looked at all parts and is slow. Rank 2 is lost, rank 1 notices it: it must keep
    its part, which rank 0 publishes now."""
    points = {
        0: [f"{_LEADS['manifest']}:slow"],
        2: [f"{_SAVES}.committer.RankCommitter._vote:after:2:kill"],
    }
    ranks = _start(nodes, run, points=points)
    _expect_lost(nodes, ranks[:2], ranks[2])
    _expect_usable(nodes, run, 1)


@pytest.mark.parametrize("victim", [0, 2])
def test_full_disk_on_one_node(nodes: Nodes, run: Path, victim: int) -> None:
    """The save fails in all ranks with the name of the rank; the next save works."""
    points = {victim: [f"{_SAVES}.part_writer.PartWriter.write:before:2:full"]}
    ranks = _start(nodes, run, how="retry", points=points)
    _expect_done(nodes, ranks)
    for rank in ranks:
        failed = re.findall(r"^failed (\d+) (.*)$", rank.stdout(), re.M)
        assert [step for step, _ in failed] == ["2"], rank.stdout()
        assert f"rank {victim} (host node{victim})" in failed[0][1]
        assert "No space left on device" in failed[0][1]
    assert set(os.listdir(run)) == {".iobench-lock", "step-1", "step-3"}
    _expect_usable(nodes, run, 3)


def test_directory_of_one_node(nodes: Nodes, tmp_path: Path) -> None:
    """One node has another directory under the same name. Rank 0 sees that a part is missing."""
    run = tmp_path / "run"
    run.mkdir()
    nodes[1].mount_tmpfs(run, 1 << 20)
    try:
        ranks = _start(nodes, run)
        assert 0 not in nodes.wait(ranks, _LIMIT_S)
        for rank in ranks:
            assert "rank 1 on host node1" in rank.stdout(), rank.stdout()
            assert "all ranks need the same directory" in rank.stdout()
        assert not nodes[1].run("find", str(run), "-mindepth", "1")
    finally:
        nodes[1].unmount(run)
    assert newest_checked(run) == -1
    _expect_done(nodes, _start(nodes, run, saves=1))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "removed"])
@pytest.mark.parametrize("file", ["__1_0.distcp", "part-2.json"])
def test_part_damaged_before_the_commit(nodes: Nodes, run: Path, file: str, damage: str) -> None:
    """Rank 0 looks at every part before it publishes. A flipped bit in data is found by loads."""
    ranks = _start(nodes, run, points={0: [f"{_SAVES}.assembly.Assembly.publish:before:1:stop"]})
    ranks[0].wait_stopped(_LIMIT_S)
    (part,) = run.glob(f".step-1.*/{file}")
    _damage(part, damage)
    ranks[0].resume()
    if damage == "flipped" and file.endswith("distcp"):
        _expect_done(nodes, ranks)
        _expect_usable(nodes, run, 3)
        return
    assert 0 not in nodes.wait(ranks, _LIMIT_S)
    said = f"rank {file.strip('_part-')[0]} on host" if damage == "removed" else file
    assert said in ranks[1].stdout(), ranks[1].stdout()
    assert sorted(path.name for path in run.glob("step-*")) == ["step-0"]
    _expect_usable(nodes, run, 0)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "removed"])
def test_checkpoint_damaged_after_the_commit(nodes: Nodes, run: Path, damage: str) -> None:
    """All ranks refuse the damaged checkpoint, or all restore the one before it."""
    _expect_done(nodes, _start(nodes, run, saves=1))
    _damage(run / "step-1" / "__2_0.distcp", damage)
    ranks = _start(nodes, run)
    assert 0 not in nodes.wait(ranks, _LIMIT_S), [rank.stdout() for rank in ranks]
    assert all("__2_0.distcp" in rank.stdout() + rank.stderr() for rank in ranks)
    ranks = _start(nodes, run, saves=2, how="previous", order=(1, 2, 0))
    _expect_done(nodes, ranks)
    assert all("loaded 0\n" in rank.stdout() for rank in ranks)
    assert newest_checked(run) == 2


def test_two_jobs_in_one_directory(nodes: Nodes, tmp_path: Path) -> None:
    """The second job ends with the name of the first one; the first one goes on."""
    run = tmp_path / "run"
    first = nodes.ranks(_TRAINS, str(run), 20, 0.1, "wait", order=(0, 1))
    first[0].wait_for("saved 1", _LIMIT_S)
    second = nodes.ranks(_TRAINS, str(run), 3, 0.0, "wait", order=(2, 1))
    assert 0 not in nodes.wait(second, _LIMIT_S)
    for rank in second:
        assert "is in use" in rank.stdout() + rank.stderr()
        assert "on host node0" in rank.stdout() + rank.stderr()
    _expect_done(nodes, first)
    assert newest_checked(run) == 19


def _damage(path: Path, damage: str) -> None:
    if damage == "removed":
        path.unlink()
    elif damage == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    else:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))
