"""kill -9 of a trainer whose Checkpointer pins offloaded state: a manifest names durable
generations only, each with its own bits, and no pin stays without a manifest."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.offload_checkpoints import PINS, CheckpointKills
from support.offload_kills import STEPS
from support.offload_training import OPTIONS, VALUES, give_gradients, make_parameters

from iobench.offload import AdamW

_STORE = "iobench.offload.store.GenerationStore"
_LEDGER = "iobench.offload.pin_ledger.PinLedger"
_PUBLISH = "iobench.checkpoint.staged.StagedCheckpoint.publish"
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
    "iobench.checkpoint.store.DirectoryStore.retire": 2,
    "iobench.offload.files.StateFile.sync": 24,
    "iobench.offload.files.StateFile.write": 14,
}
"""Functions at the steps of a checkpoint, and how often a training calls them at least."""


@pytest.fixture(scope="module")
def kills() -> Iterator[CheckpointKills]:
    CheckpointKills.calls = _CALLS
    with CheckpointKills.open() as opened:
        yield opened


_NAMED = [
    *(f"{name}:before:{2 if 'retire' in name else 1}" for name in _CALLS if "File" not in name),
    *(f"{name}:after" for name in (f"{_STORE}.pin", f"{_STORE}.unpin", _PUBLISH, _COMMITTED)),
]


@pytest.mark.parametrize("point", _NAMED)
def test_named_points(point: str, kills: CheckpointKills, tmp_path: Path) -> None:
    """Each step of a checkpoint: when retention has removed one, or when the first is made."""
    code, reported = kills.run(tmp_path, point)
    assert code == -signal.SIGKILL
    kills.check(tmp_path, reported)
    code, reported = kills.run(tmp_path)
    assert code == 0
    assert kills.check(tmp_path, reported) == STEPS


def test_killed_after_all_updates_before_a_checkpoint(
    kills: CheckpointKills, tmp_path: Path
) -> None:
    """Saves are made in the background: there may be none when the last update is durable."""
    parameters = make_parameters()
    with AdamW(parameters, tmp_path / "state", **VALUES, **OPTIONS, pins=PINS) as optimizer:
        for step in range(STEPS):
            give_gradients(parameters, step)
            optimizer.step()
    code, reported = kills.run(tmp_path)
    assert code == 0
    assert kills.check(tmp_path, reported) == STEPS


def test_random_points(kills: CheckpointKills, tmp_path: Path) -> None:
    """Trainings that are killed at random calls, again and again until they end: 8 kills."""
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    try:
        while kills.kills < 8 or not kills.finished:
            kills.kill_at_random(tmp_path / "run", moments)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
