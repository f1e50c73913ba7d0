"""Ranks that a real launcher has started, as docs/run-over-ranks.md says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.slurm import open_slurm, slurm_lacks

_PLACES = """
import json
from iobench.ranks.control import Control
from iobench.ranks.world import World

world = World.detect()
own = [world.launcher, world.rank, world.size, world.local_rank, world.local_size, world.node]
with Control.connect(world, deadline_s=60) as control:
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


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (mpich)")
def test_mpirun(tmp_path: Path) -> None:
    """Two ranks of one node find each other from the environment alone."""
    repository = Path(__file__).parents[2]
    done = subprocess.run(
        ["mpirun", "-n", "2", sys.executable, "-c", _PLACES],
        cwd=tmp_path,
        env={**os.environ, **_AS_ROOT, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (first, job), (second, other) = json.loads(done.stdout)
    assert first == ["mpi", 0, 2, 0, 2, 0]
    assert second == ["mpi", 1, 2, 1, 2, 0]
    assert job == other


@pytest.mark.root
@pytest.mark.skipif(slurm_lacks() is not None, reason=slurm_lacks() or "")
def test_srun(tmp_path: Path) -> None:
    """Two tasks of one node, below a controller and a node of Slurm that this test starts."""
    repository = Path(__file__).parents[2]
    with open_slurm(tmp_path) as environment:
        done = subprocess.run(
            ["srun", "-n", "2", sys.executable, "-c", _PLACES],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(repository)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    (first, job), (second, other) = json.loads(done.stdout)
    assert first == ["slurm", 0, 2, 0, 2, 0]
    assert second == ["slurm", 1, 2, 1, 2, 0]
    assert job == other
