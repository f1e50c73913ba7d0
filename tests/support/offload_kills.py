"""Trainings with offloaded state that are killed, and what resume must find afterwards."""

import random
import shutil
import signal
from pathlib import Path

import torch

from iobench.errors import TargetError
from iobench.offload import AdamW
from iobench.offload.files import read_layout
from iobench.offload.layout import read_records
from support.offload_training import (
    Snapshot,
    assert_equal,
    make_parameters,
    reports,
    snapshot,
    stock_snapshots,
)
from support.preloaded import run_preloaded

STEPS = 6
_LIMIT_S = 65.0

_OFFLOAD = "iobench.offload"
CALLS = {
    "iobench.writers.direct.engine.RingEngine._submit": 210,
    f"{_OFFLOAD}.files.StateFile.sync": 21,
    f"{_OFFLOAD}.files.StateFile.write": 9,
    f"{_OFFLOAD}.engine.Engine._write": 42,
    f"{_OFFLOAD}.update.ChunkUpdate.__call__": 42,
}
"""Functions that make one system call, or work on one chunk, and how often a run calls them."""

_TRAINER = """
import faulthandler, sys
import torch
from pathlib import Path
from support.kill_points import arm
from {module} import {trainer}

faulthandler.dump_traceback_later({limit_s} - 5)  # one that hangs prints its stacks
torch.set_num_threads(1)
directory, steps, *points = sys.argv[1:]
for point in points:
    if point != "overlap":
        arm(point)
{trainer}(Path(directory), int(steps), overlap="overlap" in points)
"""


class OffloadKills:
    """Runs trainings of STEPS steps."""

    module, trainer = "support.offload_training", "train_and_report"
    """The function that a training calls, with a directory and the steps."""
    calls = CALLS

    def __init__(self) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        self.expected: list[Snapshot] = stock_snapshots(STEPS)
        torch.set_num_threads(before)
        self.kills = self.finished = 0

    def run(self, directory: Path, *points: str) -> tuple[int, dict[str, int]]:
        """Train, or go on; return the exit code and what the trainer reported as durable.

        "overlap" in `points`: chunks are updated during backward.
        """
        script = _TRAINER.format(limit_s=_LIMIT_S, module=self.module, trainer=self.trainer)
        arguments = ["-c", script, directory, STEPS, *points]
        done = run_preloaded(arguments, timeout=_LIMIT_S, stderr=None)
        return done.returncode, reports(done.stdout.splitlines())

    def check(self, directory: Path, reported: dict[str, int]) -> int:
        """Compare what resume finds with the stock training; return its updates.

        Nothing that was reported is lost, and each pin has its own state.
        """
        try:
            records = read_records(directory, read_layout(directory))
        except TargetError:  # killed while the files were made
            records = []
        if not records:
            assert not reported.get("durable", 0)
            return 0
        with AdamW.resume(make_parameters(9), directory, verify=True) as optimizer:
            assert not optimizer.restored.passed_over
            updates = optimizer.updates
            assert updates >= reported.get("durable", 0)
            assert_equal(snapshot(optimizer), self.expected[updates - 1])
            pinned = optimizer.pinned()
        assert [0, *pinned][-1] >= reported.get("pinned", 0)
        for step in pinned:
            with AdamW.resume(make_parameters(9), directory, step=step, verify=True) as one:
                assert one.restored.extra == {"step": step}
                assert_equal(snapshot(one), self.expected[step - 1])
        return updates

    def kill_until(self, kills: int, directory: Path) -> None:
        """Train in `directory`, killed at random calls, again and again until they end: so many
        kills at least."""
        seed = random.randrange(2**32)
        moments = random.Random(seed)
        try:
            while self.kills < kills or not self.finished:
                self.kill_at_random(directory, moments)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise

    def kill_at_random(self, directory: Path, moments: random.Random) -> str:
        """Kill the training in `directory` at a random call, if it gets there, and check it.

        A training that has ended is removed. Returns the point.
        """
        calls = self.calls
        name = moments.choice(sorted(calls))
        when, call = moments.choice(["before", "after"]), moments.randint(1, calls[name])
        point = f"{name}:{when}:{call}"
        options = ["overlap"] if moments.random() < 0.5 else []
        try:
            code, reported = self.run(directory, point, *options)
            assert code in (0, -signal.SIGKILL), code
            updates = self.check(directory, reported)
            assert code or updates == STEPS
        except BaseException as error:
            error.add_note(f"kill {self.kills} at {point} {options}")
            raise
        if code:
            self.kills += 1
        else:
            self.finished += 1
            shutil.rmtree(directory)
        return point
