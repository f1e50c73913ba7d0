"""Ranks with snapshots in memory tiers end, or are killed: nothing that was durable is lost."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from iobench import Checkpointer, load_checkpoint
from tests.support.ranks import lose, start_ranks

pytestmark = [
    pytest.mark.usefixtures("importing"),
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs at /dev/shm"),
]

_TRAINER = """
import atexit, sys, warnings
sys.path.insert(0, "tests")
import torch
from support import kill_points
from support.rank_scripts import joined
from iobench import Checkpointer, Memory
from iobench.errors import RankError

local, shared, victim, point = {arguments!r}
world = joined()
tiers = [Memory("5MiB"), Memory("24MiB", path=shared)]
if world.rank == victim:
    kill_points.arm(point)
try:
    ckpt = Checkpointer(local, tiers=tiers, deadline_s=30)

    def save(step):
        ckpt.save_async({{"w": torch.full((1 << 18,), float(step))}}, step)

    if victim is None:  # it is never closed
        warnings.simplefilter("ignore", ResourceWarning)
        atexit.register(save, 100)
        for step in range(1, 31):
            save(step)
    else:
        with ckpt:
            for step in range(1, 31):
                save(step)
            ckpt.wait()
            while True:
                ckpt.latest()
except RankError as error:
    print("lost", list(error.ranks), flush=True)
    raise SystemExit(3)
"""

_PERSISTER = "iobench.checkpoint.persister.Persister"
_POINTS = [
    (1, f"{_PERSISTER}._follow:before:3"),
    (0, f"{_PERSISTER}._agree:after:9"),
    (0, "iobench.checkpoint.ranked.dcp_files.DcpFormat.publish:before:4"),
]
_MORE = [
    (1, "iobench.checkpoint.ranked.dcp_files.DcpFormat.write:before:4"),
    (1, "iobench.checkpoint.ranked.dcp_files.DcpFormat.write:after:4"),
    (1, f"{_PERSISTER}._agree:before:9"),
    (0, "iobench.checkpoint.ranked.messages.Turns.newly_gone:after:5"),
]
"""The rank that is lost, and where."""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory on tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.parametrize(
    ("victim", "point"),
    [*_POINTS, *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in _MORE)],
)
def test_a_rank_is_killed(victim: int, point: str, tmp_path, shared) -> None:
    """The other one ends with its number; what is visible is complete, and a start goes on."""
    local = tmp_path / "local"
    code = _TRAINER.format(arguments=(str(local), str(shared), victim, point))
    lose(code, victim)
    assert os.listdir(shared) == []
    steps = [int(path.name.removeprefix("step-")) for path in local.glob("step-*")]
    for step in steps:
        assert load_checkpoint(local, step)["w"].unique().tolist() == [step]
    with Checkpointer(local) as ckpt:
        assert ckpt.steps() == sorted(steps)
        if steps:
            assert ckpt.load()["w"].unique().tolist() == [max(steps)]
    assert [path for path in local.iterdir() if path.name.startswith(".step-")] == []


def test_ranks_that_end_without_close(tmp_path, shared) -> None:
    """Every snapshot is written, also one of an atexit function."""
    local = tmp_path / "local"
    with start_ranks(_TRAINER.format(arguments=(str(local), str(shared), None, "")), 2) as ranks:
        for ended, _, said in ranks.ends():
            assert ended == 0, said
    assert {path.name for path in local.glob("step-*")} == {
        f"step-{step}" for step in [*range(1, 31), 100]
    }
    assert load_checkpoint(local)["w"].unique().tolist() == [100]
