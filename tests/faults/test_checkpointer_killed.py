"""kill -9 of a trainer at any moment of its background saves."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from iobench import Checkpointer, load_checkpoint

_KILLS = 25
_SIZE = 50_000
_SILENCE_S = 20

_TRAINERS = """
import faulthandler, os, sys
import torch
from iobench import Checkpointer, KeepLast

def train(directory, mode, size):
    ckpt = Checkpointer(directory, writer="odirect", keep=KeepLast(2), lazy=mode == "lazy", slots=3)
    step = (ckpt.latest() or 0)
    state = {"w": torch.full((size,), float(step)), "step": step}
    told = 0
    while True:
        step += 1
        ckpt.before_optimizer_step()
        state["w"].add_(1)
        state["step"] = step
        save = (ckpt.save if mode == "sync" else ckpt.save_async)(state, step)
        known = max((s.step for s in ckpt.saves if s.status == "committed"), default=0)
        if known > told:
            told = known
            print("step", known, flush=True)

for line in sys.stdin:
    directory, mode, size = line.split()
    child = os.fork()  # before torch has threads
    if not child:
        faulthandler.dump_traceback_later(60, exit=True)  # one that hangs tells where
        train(directory, mode, int(size))
    print("pid", child, flush=True)
    _, status = os.waitpid(child, 0)
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.parametrize("mode", ["async", "lazy", "sync"])
def test_killed(mode: str, tmp_path: Path) -> None:
    """`load` returns the newest complete checkpoint, and no reported checkpoint is lost."""
    moments = random.Random(mode)
    command = [sys.executable, "-c", _TRAINERS]
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save({"w": torch.zeros(_SIZE), "step": 0}, 0)
    held = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        trainers = _Trainers(process)
        for number in range(_KILLS):
            after = ("pid", "step")[number % 2]
            told = _kill_one(trainers, tmp_path, mode, after, moments.uniform(0, 0.05))
            state = load_checkpoint(tmp_path)
            assert state["w"].unique().tolist() == [state["step"]]
            assert len(state["w"]) == _SIZE
            assert state["step"] >= max(told, held)
            held = state["step"]
    with Checkpointer(tmp_path) as ckpt:  # which removes what is half written
        left = {path.name for path in tmp_path.iterdir()} - {".iobench-lock"}
        assert left == {f"step-{step}" for step in ckpt.steps()}
    assert held >= _KILLS // 2


class _Trainers:
    """The process that starts trainers: requests to it, and lines from it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._pid, self._requests = process.pid, process.stdin
        self._fd, self._rest = process.stdout.fileno(), b""
        self._asked_again = False

    def ask(self, request: str) -> None:
        self._request = request.encode() + b"\n"
        self._requests.write(self._request)
        self._requests.flush()

    def line(self) -> str:
        while b"\n" not in self._rest:
            if not select.select([self._fd], [], [], _SILENCE_S)[0]:
                self._after_silence()
                continue
            data = os.read(self._fd, 4096)
            assert data, "the trainers ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def _after_silence(self) -> None:
        """Ask once more if no trainer lives; one that hangs is ended by its own watchdog.

        Seen twice in about 20 runs on a loaded machine (Linux 6.18), cause unknown: both sides
        wait for the other although no trainer exists, so what is tested here has not hung.
        """
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text()
        if not children:
            assert not self._asked_again, "no trainer is started, twice"
            self._asked_again = True
            self._requests.write(self._request)
            self._requests.flush()


def _kill_one(trainers: _Trainers, directory: Path, mode: str, after: str, delay_s: float) -> int:
    """Kill a trainer some time after its start or first reported step; return its last step.

    It must live until then: one that fails, or hangs for a minute, fails the test.
    """
    trainers.ask(f"{directory} {mode} {_SIZE}")
    pid = told = 0
    while True:
        what, number = trainers.line().split()
        if what == "ended":
            assert int(number) == -signal.SIGKILL, "the trainer failed or hung; see stderr"
            return told
        if what == "pid":
            pid = int(number)
        else:
            told = int(number)
        if pid and after in ("pid", what):
            threading.Event().wait(delay_s)
            os.kill(pid, signal.SIGKILL)
            after = "ended"
