"""kill -9 of a trainer with offloaded state: at named points, and at random ones between system
calls. Resume finds the newest whole generation, and the training goes on with the same bits."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.offload_training import (
    assert_equal,
    make_parameters,
    reports,
    snapshot,
    stock_snapshots,
)
from support.preloaded import Preloaded

from iobench.offload import AdamW
from iobench.offload.files import read_layout
from iobench.offload.store import read_records

_STEPS = 6
_KILLS = 30

_TRAINERS = """
import os, sys
import torch
import iobench.offload.adamw
from pathlib import Path
from support.kill_points import arm
from support.offload_training import train_and_report

torch.set_num_threads(1)
for line in sys.stdin:
    directory, steps, *points = line.split()
    child = os.fork()  # before torch has threads
    if not child:
        import faulthandler
        faulthandler.dump_traceback_later(60, exit=True)  # a child that hangs prints its stacks
        for point in points:
            arm(point)
        train_and_report(Path(directory), int(steps))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.write(1, f"ended {os.waitstatus_to_exitcode(status)}\\n".encode())
"""

_START = "iobench.writers.direct.in_flight.InFlight.start"
_SYNC = "iobench.offload.files.StateFile.sync"
_WRITE = "iobench.offload.files.StateFile.write"
_COMMIT = "iobench.offload.store.GenerationStore.commit"
_PIN = "iobench.offload.store.GenerationStore.pin"
_EXTRA = "iobench.offload.store.write_bytes"
_CHUNK = "iobench.offload.writing.ChunkWriter.write"
_UPDATE = "iobench.offload.adam.AdamUpdate.__call__"
_FILES = "iobench.offload.files.make_files"
_LAYOUT = "iobench.offload.files.write_text"

_NAMED = [
    *(f"{name}:{when}" for name in (_FILES, _LAYOUT) for when in ("before", "after")),
    *(f"{_CHUNK}:before:{chunk}" for chunk in (1, 14, 15, 18)),  # of seven
    *(f"{_SYNC}:{when}:{call}" for when in ("before", "after") for call in (7, 8, 9, 10)),
    *(f"{_WRITE}:{when}:{call}" for when in ("before", "after") for call in (1, 2, 3, 4)),
    *(f"{_COMMIT}:after:{call}" for call in (1, 3)),
    *(f"{name}:{when}:2" for name in (_PIN, _EXTRA) for when in ("before", "after")),
]
_CALLS = {_START: 210, _SYNC: 27, _WRITE: 9, _CHUNK: 42, _UPDATE: 42}
"""Functions that make one system call or change one chunk, and how often a run calls them."""


@pytest.fixture(scope="module")
def trainers() -> Iterator[Preloaded]:
    """A process that imports torch once, and forks the trainers."""
    with Preloaded(["-c", _TRAINERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        yield started


@pytest.fixture(scope="module")
def expected() -> list[list[dict[str, torch.Tensor]]]:
    """The snapshots of the stock training after each step."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    found = stock_snapshots(_STEPS)
    torch.set_num_threads(before)
    return found


def _run(trainers: Preloaded, directory: Path, *points: str) -> tuple[int, dict[str, int]]:
    """Train in a child; return its exit code and what it reported."""
    assert trainers.stdin is not None
    assert trainers.stdout is not None
    print(directory, _STEPS, *points, file=trainers.stdin, flush=True)
    lines = []
    for line in trainers.stdout:
        if line.startswith("ended"):
            return int(line.split()[1]), reports(iter(lines))
        lines.append(line)
    raise AssertionError("the trainers ended")


def _check(directory: Path, reported: dict[str, int], expected: list) -> int:
    """Compare what resume finds with the stock training; return its updates."""
    try:
        records = read_records(directory, read_layout(directory))
    except Exception:  # noqa: BLE001 -- killed while the files were made
        records = []
    if not records:
        assert not reported.get("durable", 0)
        return 0
    with AdamW.resume(make_parameters(9), directory, verify=True) as optimizer:
        assert not optimizer.restored.passed_over
        updates = optimizer.updates
        assert updates >= reported.get("durable", 0)
        assert_equal(snapshot(optimizer), expected[updates - 1])
        pinned = optimizer.pinned()
        assert not pinned or pinned[-1] >= reported.get("pinned", 0)
        assert pinned or not reported.get("pinned", 0)
    for step in pinned:
        with AdamW.resume(make_parameters(9), directory, step=step, verify=True) as optimizer:
            assert optimizer.restored.extra == {"step": step}
            assert_equal(snapshot(optimizer), expected[step - 1])
    return updates


@pytest.mark.parametrize("point", _NAMED)
def test_named_points(point: str, trainers: Preloaded, tmp_path: Path, expected: list) -> None:
    """At each step of the construction, the commit and the pin; then the run goes on to its end."""
    code, reported = _run(trainers, tmp_path, point)
    assert code == -signal.SIGKILL
    _check(tmp_path, reported, expected)
    code, reported = _run(trainers, tmp_path)
    assert code == 0
    assert _check(tmp_path, reported, expected) == _STEPS


def test_random_points(trainers: Preloaded, tmp_path: Path, expected: list) -> None:
    """One training, killed at random calls until it has ended; started anew, 30 kills in all."""
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    kills = finished = 0
    while kills < _KILLS or not finished:
        name = moments.choice(sorted(_CALLS))
        when, call = moments.choice(["before", "after"]), moments.randint(1, _CALLS[name])
        point = f"{name}:{when}:{call}"
        try:
            code, reported = _run(trainers, tmp_path, point)
            assert code in (0, -signal.SIGKILL)
            updates = _check(tmp_path, reported, expected)
            assert code or updates == _STEPS
        except BaseException as error:
            error.add_note(f"seed {seed}, kill {kills} at {point}")
            raise
        kills += code != 0
        if code == 0:
            finished += 1
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()


@pytest.mark.parametrize("action", ["full", "error"])
@pytest.mark.parametrize(
    "point", [f"{_SYNC}:before:8", f"{_WRITE}:before:3", f"{_START}:before:90"]
)
def test_failures_reach_the_trainer(
    point: str, action: str, trainers: Preloaded, tmp_path: Path, expected: list
) -> None:
    """ENOSPC, or a bug, in a thread of the engine ends the training, and resume goes on."""
    name, when, call = point.split(":")
    code, reported = _run(trainers, tmp_path, f"{name}:{when}:{call}:{action}")
    assert code == 1
    _check(tmp_path, reported, expected)
    assert _run(trainers, tmp_path)[0] == 0
    assert _check(tmp_path, {}, expected) == _STEPS
