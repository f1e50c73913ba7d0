"""kill -9 of a trainer at random moments of its background saves."""

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from support.preloaded import Preloaded

from iobench import Checkpointer, load_checkpoint

pytestmark = pytest.mark.usefixtures("importing")
_KILLS = 16
_SIZE = 50_000

_TRAINER = """
import faulthandler, os, sys
import torch
from iobench import Checkpointer, KeepLast

faulthandler.dump_traceback_later(60, exit=True)  # one that hangs prints its stacks
directory, mode, size = sys.argv[1:]
ckpt = Checkpointer(
    directory,
    writer="odirect",
    keep=KeepLast(2),
    lazy="lazy" in mode,
    budget="64KiB" if "budget" in mode else None,
    slots=3,
)
step = (ckpt.latest() or 0)
state = {"w": torch.full((int(size),), float(step)), "step": step}
reported = 0
while True:
    step += 1
    ckpt.before_optimizer_step()
    state["w"].add_(1)
    state["step"] = step
    save = (ckpt.save if mode == "sync" else ckpt.save_async)(state, step)
    known = max((s.step for s in ckpt.saves if s.status == "committed"), default=0)
    if known > reported:
        reported = known
        os.write(1, f"{known}\\n".encode())  # one write, because a kill falls between two
"""


@pytest.mark.parametrize("mode", ["async", "lazy", "sync", "budget", "lazy-budget"])
def test_killed(mode: str, tmp_path) -> None:
    """`load` returns the newest complete checkpoint, and no reported checkpoint is lost."""
    moments = random.Random(mode)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save({"w": torch.zeros(_SIZE), "step": 0}, 0)
    held = 0
    for number in range(_KILLS):
        reported = _kill_one(tmp_path, mode, moments.uniform(0, 0.05), at_once=not number % 2)
        state = load_checkpoint(tmp_path)
        assert state["w"].unique().tolist() == [state["step"]]
        assert len(state["w"]) == _SIZE
        assert state["step"] >= max(reported, held)
        held = state["step"]
    with Checkpointer(tmp_path) as ckpt:  # which removes what is half written
        left = {path.name for path in tmp_path.iterdir()} - {".iobench-lock"}
        assert left == {f"step-{step}" for step in ckpt.steps()}
    assert held >= _KILLS // 2


def _kill_one(directory: Path, mode: str, delay_s: float, *, at_once: bool) -> int:
    """Kill a trainer some time after its start or first reported step; return its last step.

    It must live until then: one that fails, or hangs for a minute, fails the test.
    """
    arguments = ["-c", _TRAINER, directory, mode, _SIZE]
    with Preloaded(arguments, stdout=subprocess.PIPE) as trainer:
        reported = [] if at_once else [trainer.stdout.readline()]
        time.sleep(delay_s)
        trainer.kill()
        reported += trainer.stdout.readlines()
    assert trainer.returncode == -signal.SIGKILL, "the trainer failed or hung; see stderr"
    return int([0, *reported][-1])
