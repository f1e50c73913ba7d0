"""kill -9 of a trainer at random moments of its background saves."""

import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.preloaded import Preloaded

from iobench import Checkpointer, load_checkpoint

_KILLS = 16
_SIZE = 50_000

_TRAINERS = """
import faulthandler, os, sys
import torch
from iobench import Checkpointer, KeepLast

def say(what, number):
    # One write, because a kill falls between two: with PYTHONUNBUFFERED, print writes every word
    # on its own, and "step" without its end would make one line with the next process's "ended".
    os.write(sys.stdout.fileno(), f"{what} {number}\\n".encode())

def train(directory, mode, size):
    ckpt = Checkpointer(
        directory,
        writer="odirect",
        keep=KeepLast(2),
        lazy="lazy" in mode,
        budget="64KiB" if "budget" in mode else None,
        slots=3,
    )
    step = (ckpt.latest() or 0)
    state = {"w": torch.full((size,), float(step)), "step": step}
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
            say("step", known)

for line in sys.stdin:
    directory, mode, size = line.split()
    child = os.fork()  # before torch has threads
    if not child:
        faulthandler.dump_traceback_later(60, exit=True)  # a child that hangs prints its stacks
        train(directory, mode, int(size))
    say("pid", child)
    _, status = os.waitpid(child, 0)
    say("ended", os.waitstatus_to_exitcode(status))
"""


@pytest.fixture(scope="module")
def trainers() -> Iterator[Preloaded]:
    """A process that imports torch once, and forks the trainers."""
    with Preloaded(["-c", _TRAINERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        yield started


@pytest.mark.parametrize("mode", ["async", "lazy", "sync", "budget", "lazy-budget"])
def test_killed(mode: str, trainers, tmp_path) -> None:
    """`load` returns the newest complete checkpoint, and no reported checkpoint is lost."""
    moments = random.Random(mode)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save({"w": torch.zeros(_SIZE), "step": 0}, 0)
    held = 0
    for number in range(_KILLS):
        after = ("pid", "step")[number % 2]
        reported = _kill_one(trainers, tmp_path, mode, after, moments.uniform(0, 0.05))
        state = load_checkpoint(tmp_path)
        assert state["w"].unique().tolist() == [state["step"]]
        assert len(state["w"]) == _SIZE
        assert state["step"] >= max(reported, held)
        held = state["step"]
    with Checkpointer(tmp_path) as ckpt:  # which removes what is half written
        left = {path.name for path in tmp_path.iterdir()} - {".iobench-lock"}
        assert left == {f"step-{step}" for step in ckpt.steps()}
    assert held >= _KILLS // 2


def _kill_one(trainers: Preloaded, directory: Path, mode: str, after: str, delay_s: float) -> int:
    """Kill a trainer some time after its start or first reported step; return its last step.

    It must live until then: one that fails, or hangs for a minute, fails the test.
    """
    assert trainers.stdin is not None
    assert trainers.stdout is not None
    print(directory, mode, _SIZE, file=trainers.stdin, flush=True)
    pid = reported = 0
    for line in trainers.stdout:
        what, number = line.split()
        if what == "ended":
            assert int(number) == -signal.SIGKILL, "the trainer failed or hung; see stderr"
            return reported
        if what == "pid":
            pid = int(number)
        else:
            assert what == "step", line
            reported = int(number)
        if pid and after in ("pid", what):
            threading.Event().wait(delay_s)
            os.kill(pid, signal.SIGKILL)
            after = "ended"
    raise AssertionError("the trainers ended")
