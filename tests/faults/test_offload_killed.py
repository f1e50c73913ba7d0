"""kill -9 of a trainer with offloaded state: at named points, and at random ones between system
calls. Resume finds the newest whole generation, and the training goes on with the same bits."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.offload_kills import STEPS, OffloadKills

_KILLS = 30

_START = "iobench.writers.direct.in_flight.InFlight.start"
_SYNC = "iobench.offload.files.StateFile.sync"
_WRITE = "iobench.offload.files.StateFile.write"
_COMMIT = "iobench.offload.store.GenerationStore.commit"
_PIN = "iobench.offload.store.GenerationStore.pin"
_CHUNK = "iobench.offload.chunks.ChunkWriter.write"
_FILES = "iobench.offload.files.make_files"
_LAYOUT = "iobench.offload.files.write_text"

_NAMED = [
    *(f"{name}:{when}" for name in (_FILES, _LAYOUT) for when in ("before", "after")),
    *(f"{_CHUNK}:before:{chunk}" for chunk in (1, 14, 15, 18)),  # of seven
    *(f"{_SYNC}:{when}:{call}" for when in ("before", "after") for call in (7, 8, 9, 10)),
    *(f"{_WRITE}:{when}:{call}" for when in ("before", "after") for call in (1, 2, 3)),
    *(f"{_COMMIT}:after:{call}" for call in (1, 3)),
    *(f"{_PIN}:{when}:2" for when in ("before", "after")),
]


@pytest.fixture(scope="module")
def kills() -> Iterator[OffloadKills]:
    with OffloadKills.open() as opened:
        yield opened


@pytest.mark.parametrize("point", _NAMED)
def test_named_points(point: str, kills: OffloadKills, tmp_path: Path) -> None:
    """At each step of the construction, the commit and the pin; then the run goes on to its end."""
    code, reported = kills.run(tmp_path, point)
    assert code == -signal.SIGKILL
    kills.check(tmp_path, reported)
    code, reported = kills.run(tmp_path)
    assert code == 0
    assert kills.check(tmp_path, reported) == STEPS


def test_random_points(kills: OffloadKills, tmp_path: Path) -> None:
    """Trainings that are killed at random calls, again and again until they end: 30 kills."""
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    try:
        while kills.kills < _KILLS or not kills.finished:
            kills.kill_at_random(tmp_path / "state", moments)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.parametrize("action", ["full", "error"])
@pytest.mark.parametrize(
    "point", [f"{_SYNC}:before:8", f"{_WRITE}:before:3", f"{_START}:before:90"]
)
def test_failures_reach_the_trainer(
    point: str, action: str, kills: OffloadKills, tmp_path: Path
) -> None:
    """ENOSPC, or a bug, in a thread of the engine ends the training, and resume goes on."""
    code, reported = kills.run(tmp_path, f"{point}:{action}")
    assert code == 1
    kills.check(tmp_path, reported)
    assert kills.run(tmp_path)[0] == 0
    assert kills.check(tmp_path, {}) == STEPS
