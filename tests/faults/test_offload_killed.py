"""kill -9 of a trainer with offloaded state: at named points, and at random ones between system
calls. Resume finds the newest whole generation, and the training goes on with the same bits. If a
Checkpointer pins it, a manifest names durable generations only, each with its own bits, and no pin
stays without a manifest."""

import signal

import pytest
from support.offload_checkpoints import PINS, CheckpointKills
from support.offload_kills import STEPS, OffloadKills
from support.offload_training import OPTIONS, VALUES, give_gradients, make_parameters

from iobench.offload import AdamW

pytestmark = pytest.mark.usefixtures("importing")
_RING = "iobench.writers.direct.ring.PyuringRing.write"
_SYNC = "iobench.offload.files.StateFile.sync"
_WRITE = "iobench.offload.files.StateFile.write"
_COMMIT = "iobench.offload.store.GenerationStore.commit"
_PIN = "iobench.offload.store.GenerationStore.pin"
_CHUNK = "iobench.offload.engine.Engine._write"
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
def kills() -> OffloadKills:
    return OffloadKills()


def test_random_points(kills, tmp_path) -> None:
    """Trainings that are killed at random calls, again and again until they end: 30 kills."""
    kills.kill_until(30, tmp_path / "state")


@pytest.mark.parametrize("action", ["full", "error"])
@pytest.mark.parametrize("point", [f"{_SYNC}:before:8", f"{_WRITE}:before:3", f"{_RING}:before:40"])
def test_failures_reach_the_trainer(point, action, kills, tmp_path) -> None:
    """ENOSPC, or a bug, in a thread of the engine ends the training, and resume goes on."""
    code, reported = kills.run(tmp_path, f"{point}:{action}")
    assert code == 1
    kills.check(tmp_path, reported)
    assert kills.run(tmp_path)[0] == 0
    assert kills.check(tmp_path, {}) == STEPS


_STORE = "iobench.offload.store.GenerationStore"
_LEDGER = "iobench.offload.saves.PinLedger"
_PUBLISH = "iobench.checkpoint.store.StagedCheckpoint.publish"
_COMMITTED = "iobench.checkpoint.ledger.Ledger.committed"
_CALLS = {
    f"{_STORE}.pin": 5,
    f"{_STORE}.unpin": 3,
    f"{_LEDGER}.hold": 5,
    f"{_LEDGER}.durable": 4,
    f"{_LEDGER}.ended": 4,
    f"{_LEDGER}.sweep": 5,
    _PUBLISH: 4,
    _COMMITTED: 4,
    "iobench.checkpoint.store.DirectoryStore.remove": 2,
    "iobench.offload.files.StateFile.sync": 24,
    "iobench.offload.files.StateFile.write": 14,
}
"""Functions at the steps of a checkpoint, and how often a training calls them at least."""


@pytest.fixture(scope="module")
def pinning() -> CheckpointKills:
    CheckpointKills.calls = _CALLS
    return CheckpointKills()


_PINNING = [
    *(f"{name}:before:{2 if 'remove' in name else 1}" for name in _CALLS if "File" not in name),
    *(f"{name}:after" for name in (f"{_STORE}.pin", f"{_STORE}.unpin", _PUBLISH, _COMMITTED)),
]


@pytest.mark.parametrize(
    ("trainer", "point"),
    [*(("kills", point) for point in _NAMED), *(("pinning", point) for point in _PINNING)],
)
def test_named_points(trainer: str, point: str, request, tmp_path) -> None:
    """At each step of the construction, the commit and the pin, and of a checkpoint: when retention
    has removed one, or when the first is made. Then the run goes on to its end."""
    kills: OffloadKills = request.getfixturevalue(trainer)
    code, reported = kills.run(tmp_path, point)
    assert code == -signal.SIGKILL
    kills.check(tmp_path, reported)
    code, reported = kills.run(tmp_path)
    assert code == 0
    assert kills.check(tmp_path, reported) == STEPS


def test_killed_after_all_updates_before_a_checkpoint(pinning, tmp_path) -> None:
    """Saves are made in the background: there may be none when the last update is durable."""
    parameters = make_parameters()
    with AdamW(parameters, tmp_path / "state", **VALUES, **OPTIONS, pins=PINS) as optimizer:
        for step in range(STEPS):
            give_gradients(parameters, step)
            optimizer.step()
    code, reported = pinning.run(tmp_path)
    assert code == 0
    assert pinning.check(tmp_path, reported) == STEPS


def test_random_points_of_checkpoints(pinning, tmp_path) -> None:
    """Trainings that are killed at random calls, again and again until they end: 8 kills."""
    pinning.kill_until(8, tmp_path / "run")
