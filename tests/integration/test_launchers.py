"""Ranks that a real launcher has started, as docs/run-over-ranks.md says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
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


def _check_places(
    launcher: str, start: str, directory: Path, environment: Mapping[str, str]
) -> None:
    """Both ranks of one node have found each other from the environment alone."""
    done = subprocess.run(
        [start, "-n", "2", sys.executable, "-c", _PLACES],
        cwd=directory,
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (first, job), (second, other) = json.loads(done.stdout)
    assert (first, second) == ([launcher, 0, 2, 0, 2, 0], [launcher, 1, 2, 1, 2, 0])
    assert job == other


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (mpich)")
def test_mpirun(tmp_path: Path) -> None:
    _check_places("mpi", "mpirun", tmp_path, os.environ | _AS_ROOT)


@pytest.mark.root
@pytest.mark.skipif(slurm_lacks() is not None, reason=slurm_lacks() or "")
def test_srun(tmp_path: Path) -> None:
    """Below a controller and a node of Slurm that this test starts."""
    with open_slurm(tmp_path) as environment:
        _check_places("slurm", "srun", tmp_path, environment)
