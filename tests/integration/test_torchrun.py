"""A trainer under the real torchrun: a rank is killed, torchrun restarts the job, it goes on."""

from __future__ import annotations

import os
import re
from pathlib import Path

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


def test_torchrun_restarts_a_job(tmp_path: Path) -> None:
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
