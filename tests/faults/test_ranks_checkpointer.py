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
from support.train_scripts import newest_checked

_LOST, _KILLED = 3, -signal.SIGKILL
_LIMIT_S = 60
_TRAINS = "support.train_scripts:trains"
_SAVES = "iobench.dist.saves"

_POINTS = {
    "opening": ("iobench.dist.ranked.RankedCheckpointer._lead:after:1", 1),
    "load": ("iobench.dist.load.pieces.read_pieces:before:1", 1),
    "plan": ("iobench.dist.saves.planning.local_plan:before:1", 1),
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
    preload = [
        "support.train_scripts",
        "iobench.dist.ranked",
        "iobench.dist.load.pieces",
        "iobench.writers.odirect",
        "torch.distributed",
    ]
    with open_nodes(3, directory=tmp_path_factory.mktemp("nodes"), preload=preload) as made:
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
