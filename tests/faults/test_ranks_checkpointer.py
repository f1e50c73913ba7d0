"""A rank is lost while all ranks save or restore: the newest checkpoint stays complete.

The tests share one directory: each start of the job loads the newest step and checks every value.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.nodes import Nodes
from support.saved_run import SavedRun
from support.train_scripts import newest_checked

pytestmark = pytest.mark.usefixtures("no_process_left")
_LIMIT_S = 60
_PARTS = "iobench.checkpoint.ranked"

_POINTS = {
    "opening": ("iobench.checkpointer.opening.Opening._lead:after:1", 1),
    "load": ("iobench.checkpoint.stored.StateReader._by_pieces:before:1", 1),
    "plan": ("iobench.checkpoint.ranked.plan.Planning._agreed:before:1", 1),
    "snapshot": ("iobench.checkpointer.saving.copy_into:before:2", 2),
    "write": (f"{_PARTS}.dcp_files.DcpFormat.write:before:2", 2),
    "part manifest": (f"{_PARTS}.messages.Part.to_json:before:2", 2),
    "vote": (f"{_PARTS}.dcp_files.DcpFormat.write:after:2", 2),
    "voted": ("iobench.checkpoint.commit.Committer._cast:after:2", 2),
}
"""Points of every rank, and the number of the save that the job makes there."""

_LEADS = {
    "looks at parts": f"{_PARTS}.dcp_files.DcpFormat._part:before:4",
    "manifest": "iobench.checkpoint.store.StagedCheckpoint._write_manifest:before:2",
    "before rename": "iobench.checkpoint.store.StagedCheckpoint._write_manifest:after:2",
    "after rename": "iobench.checkpoint.store.StagedCheckpoint.publish:after:2",
    "retention": "iobench.checkpoint.ledger.Ledger.committed:before:2",
}
"""Points of rank 0 alone."""

_READING = {
    "reads": "iobench.ranks.exchange.Exchange._read:before:1",
    "sends": "iobench.ranks.exchange.Exchange._send_piece:before:1",
    "has received": "iobench.ranks.exchange.Exchange._receive_piece:after:1",
}
"""Points of a load in which the ranks pass on what one of them has read."""


@pytest.fixture(scope="module")
def shared_run(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SavedRun]:
    """A directory in which three ranks have saved; every test goes on with it."""
    made = SavedRun(nodes, tmp_path_factory.mktemp("saved"))
    made.finish()
    yield made
    made.finish()


@pytest.fixture
def run(shared_run: SavedRun) -> Iterator[SavedRun]:
    """The same. What a failed test has left is where the next one begins."""
    yield shared_run
    shared_run.newest = newest_checked(shared_run.directory)


@pytest.mark.parametrize(
    ("phase", "victim"),
    [*((phase, 1) for phase in _POINTS), *((phase, 0) for phase in ("opening", "load", "write"))],
)
def test_killed(run, phase: str, victim: int) -> None:
    """kill -9 of a rank in each phase."""
    (point, saves), before = _POINTS[phase], run.newest
    ranks = run.start(f"killed {phase}", points={victim: [f"{point}:kill"]})
    run.lose(ranks, victim, "kill")
    run.expect(ranks, before + saves - 1)


@pytest.mark.parametrize("phase", _LEADS)
def test_rank_0_killed(run, phase: str) -> None:
    """kill -9 of rank 0 while it commits the second save."""
    before = run.newest
    ranks = run.start(f"rank 0 killed {phase}", points={0: [f"{_LEADS[phase]}:kill"]})
    run.lose(ranks, 0, "kill")
    run.expect(ranks, before + (2 if phase in ("after rename", "retention") else 1))


@pytest.mark.parametrize(("phase", "victim"), [("write", 2), ("voted", 1), ("before rename", 0)])
def test_stopped(run, phase: str, victim: int) -> None:
    """SIGSTOP: the rank is silent, and its connection stays."""
    point, before = _LEADS.get(phase) or _POINTS[phase][0], run.newest
    ranks = run.start(f"stopped {phase}", points={victim: [f"{point}:stop"]})
    run.lose(ranks, victim, "stop")
    run.expect(ranks, before + 1)


@pytest.mark.parametrize(
    ("mode", "phase", "victim", "how"),
    [
        ("broadcast", "reads", 0, "kill"),
        ("broadcast", "has received", 1, "stop"),
        ("broadcast", "sends", 1, "kill"),
        ("all-gather", "sends", 0, "stop"),
        ("all-gather", "reads", 2, "kill"),
        ("all-gather", "has received", 1, "kill"),
    ],
)
def test_lost_in_a_restore(run, mode: str, phase: str, victim: int, how: str) -> None:
    """The others wait for bytes that the lost rank should read or pass on."""
    before, points = run.newest, {victim: [f"{_READING[phase]}:{how}"]}
    ranks = run.start(f"lost in {mode}, {phase}", restore_mode=mode, points=points)
    run.lose(ranks, victim, how)
    run.expect(ranks, before)
    assert run.newest == before


def test_a_rank_is_lost_after_its_vote(run) -> None:
    """Rank 0 has looked at all parts and is slow. Rank 2 is lost, rank 1 notices it: it must keep
    its part, which rank 0 publishes now."""
    points = {
        0: [f"{_LEADS['manifest']}:slow"],
        2: ["iobench.checkpoint.commit.Committer._cast:after:2:kill"],
    }
    before = run.newest
    ranks = run.start("lost after its vote", points=points)
    run.lose(ranks, 2, "kill")
    run.expect(ranks, before + 1)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "removed"])
@pytest.mark.parametrize("file", ["__1_0.distcp", "part-2.json"])
def test_part_damaged_before_the_commit(run, file, damage: str) -> None:
    """Rank 0 looks at every part before it publishes. A flipped bit in data is found by loads."""
    before = run.newest
    points = {0: [f"{_PARTS}.dcp_files.DcpFormat.publish:before:1:stop"]}
    ranks = run.start(f"part {damage}", points=points)
    ranks[0].wait_stopped(_LIMIT_S)
    (part,) = run.directory.glob(f".step-{before + 1}.*/{file}")
    _damage(part, damage)
    ranks[0].resume()
    if damage == "flipped" and file.endswith("distcp"):
        run.expect_done(ranks)  # and retention has removed that step
        assert run.newest == before + 3
        return
    assert 0 not in run.nodes.wait(ranks, _LIMIT_S)
    said = f"rank {file.strip('_part-')[0]} on host" if damage == "removed" else file
    assert said in ranks[1].stdout(), ranks[1].stdout()
    run.expect(ranks, before)
    assert run.newest == before
    assert not [name for name in os.listdir(run.directory) if name.startswith(".step-")]


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
