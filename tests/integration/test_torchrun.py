"""A trainer under the real torchrun: a rank is killed, torchrun restarts the job, it goes on."""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.captured import captured
from support.slurm import open_slurm, slurm_lacks
from support.torchrun import torchrun

_TRAINER = """
import os, signal, sys
import torch
from iobench import Checkpointer, KeepLast, PerRank
from iobench.ranks.world import World

world, restarts = World.detect(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with Checkpointer(sys.argv[1], keep=KeepLast(2), writer="buffered") as ckpt:
    step = -1
    if ckpt.latest() is not None:
        state = ckpt.load()
        step = state["step"]
        assert state["w"].unique().tolist() == [step]
        assert state["own"].tolist() == [world.rank]
    said = f"start {restarts} rank {world.rank} job {world.job} loaded {step}\\n"
    os.write(1, said.encode())  # in one piece: both ranks write to one pipe
    for now in range(step + 1, 5):
        state = {"w": torch.full((5000,), now), "own": PerRank(torch.tensor([world.rank]))}
        ckpt.save_async(state | {"step": now}, now)
        ckpt.wait()
        if (restarts, world.rank, now) == (0, 1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_torchrun_restarts_a_job(tmp_path) -> None:
    """Rank 1 is killed after the commit of step 2. Both ranks continue from it, as another job: a
    rank of the first start could not connect to the second one."""
    trainer, run = tmp_path / "trainer.py", tmp_path / "run"
    trainer.write_text(_TRAINER)
    done = torchrun(
        [
            *("--standalone", "--nproc-per-node", "2", "--max-restarts", "1"),
            *("--monitor-interval", "0.1", trainer, run),
        ],
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^start (\d) rank (\d) job (\S+) loaded (-?\d+)$", done.stdout, re.M)
    assert sorted((start, rank, step) for start, rank, _, step in found) == [
        ("0", "0", "-1"),
        ("0", "1", "-1"),
        ("1", "0", "2"),
        ("1", "1", "2"),
    ]
    assert len({(start, job) for start, _, job, _ in found}) == 2
    assert len({job for _, _, job, _ in found}) == 2
    assert set(os.listdir(run)) == {".iobench-lock", "step-3", "step-4"}


_PLACES = """
import json
from iobench.ranks.control import Control
from iobench.ranks.world import World

world = World.detect()
own = [world.launcher, world.rank, world.size, world.local_rank, world.local_size, world.node]
with Control.connect(world) as control:
    every = control.all_gather("places", [own, world.job], deadline_s=60)
if world.rank == 0:
    print(json.dumps(every))
"""
"""What every verb does first; it needs no torch, whose import takes seconds in each rank."""

_AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
"""Open MPI refuses root, and more ranks than cores; other MPIs ignore this."""


def _check_places(
    launcher: str, start: str, directory: Path, environment: Mapping[str, str]
) -> None:
    """Both ranks of one node have found each other from the environment alone."""
    done = captured(
        [start, "-n", "2", sys.executable, "-c", _PLACES],
        cwd=directory,
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (first, job), (second, other) = json.loads(done.stdout)
    assert (first, second) == ([launcher, 0, 2, 0, 2, 0], [launcher, 1, 2, 1, 2, 0])
    assert job == other


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (mpich)")
def test_mpirun(tmp_path) -> None:
    _check_places("mpi", "mpirun", tmp_path, os.environ | _AS_ROOT)


@pytest.mark.root
@pytest.mark.skipif(slurm_lacks() is not None, reason=slurm_lacks() or "")
def test_srun(tmp_path) -> None:
    """Below a controller and a node of Slurm that this test starts."""
    with open_slurm(tmp_path) as environment:
        _check_places("slurm", "srun", tmp_path, environment)
