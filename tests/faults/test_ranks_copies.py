"""A rank is stopped or killed in its copy, while another rank of its node waits to write."""

from __future__ import annotations

import signal
from pathlib import Path

import iobench
from tests.support.ranks import start_ranks

_CODE = """
import os, sys, time
import torch
from iobench import Checkpointer
from iobench.errors import RankError
from support.kill_points import arm

ckpt = Checkpointer(os.environ["DIRECTORY"], deadline_s=60)
state = {"w": torch.arange(300_000.0)}
ckpt.save_async(state, 1)
ckpt.wait()
print("saved", flush=True)
if os.environ["RANK"] == "1":
    arm("iobench.checkpoint.checkpointer.copy_into:before:1:" + os.environ["HOW"])
try:
    save = ckpt.save_async(state, 2)
    while save.status == "waiting":
        time.sleep(0.005)
    print(save.status, save.hold_s > 0, flush=True)
    ckpt.wait()
    print(save.status, flush=True)
    ckpt.close()
except RankError as error:
    print("lost", error.ranks, flush=True)
    os._exit(3)
"""


def _environ(directory: Path, how: str) -> dict[str, str]:
    tests = Path(__file__).parents[1]
    return {"DIRECTORY": str(directory), "HOW": how, "PYTHONPATH": f"{tests.parent}:{tests}"}


def test_a_stopped_rank_does_not_hold_the_others(tmp_path: Path) -> None:
    """Rank 0 waits for a bounded time, and then writes. Both commit when rank 1 goes on."""
    with start_ranks(_CODE, 2, environ=_environ(tmp_path, "stop")) as ranks:
        assert ranks.line(0) == ranks.line(1) == "saved"
        assert ranks.line(0) == "writing True"
        ranks.kill(1, signal.SIGCONT)
        ends = ranks.ends()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [out.split()[-1] for _, out, _ in ends] == ["committed"] * 2
    assert iobench.load_checkpoint(tmp_path, 2)["w"].numel() == 300_000


def test_a_killed_rank_does_not_hold_the_others(tmp_path: Path) -> None:
    """Rank 0 raises RankError with its number; the checkpoint before is complete."""
    with start_ranks(_CODE, 2, environ=_environ(tmp_path, "kill")) as ranks:
        (code, out, err), (killed, _, _) = ranks.ends()
    assert (code, killed) == (3, -signal.SIGKILL), err
    assert out.split("\n")[-2] == "lost (1,)", out
    assert iobench.load_checkpoint(tmp_path)["w"].numel() == 300_000
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-1"]
