"""Training with checkpoints has the same losses as without, also after a resume, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from iobench import Checkpointer, Every
from iobench.errors import OptionError
from iobench.train.trainer import Gpt, Trainer

_PARAMS = 300_000
_STEPS = 30
_MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"slots": 2},
    "lazy": {"slots": 2, "lazy": True},
}


def _train(trainer: Trainer, ckpt: Checkpointer | None, mode: str) -> list[float]:
    losses = []
    for step in range(trainer.steps_done, _STEPS):
        losses.append(trainer.step(ckpt.before_optimizer_step if ckpt else lambda: None))
        if ckpt and ckpt.due(step):
            (ckpt.save if mode == "sync" else ckpt.save_async)(trainer.state(), step)
    return losses


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """The losses without checkpoints."""
    return _train(Trainer(_PARAMS, ballast_bytes=5_000_000), None, "none")


@pytest.mark.parametrize("mode", _MODES)
def test_losses(mode: str, plain: list[float], tmp_path: Path) -> None:
    """Checkpoints change no loss. Training continues from each of them as if it had not stopped."""
    options = {"writer": "buffered", "schedule": Every(4), **_MODES[mode]}
    with Checkpointer(tmp_path, **options) as ckpt:
        assert _train(Trainer(_PARAMS, ballast_bytes=5_000_000), ckpt, mode) == plain
        ckpt.wait()
        assert ckpt.steps()
        for step in ckpt.steps()[-3:]:
            resumed = Trainer(_PARAMS, seed=99, ballast_bytes=5_000_000)
            resumed._seed = 0  # of the batches; the weights come from the checkpoint
            resumed.resume(ckpt.load(step, like={"model": resumed.model.state_dict()}))
            assert resumed.steps_done == step + 1
            assert _train(resumed, None, "none") == plain[step + 1 :]
            want = Trainer(_PARAMS, ballast_bytes=5_000_000)
            assert torch.equal(resumed._ballast, want._ballast + _STEPS)


def test_learns(plain: list[float]) -> None:
    """It is real training: the loss falls."""
    assert plain[-1] < plain[0] - 0.5


@pytest.mark.parametrize("params", [100_000, 1_000_000, 124_000_000])
def test_size(params: int) -> None:
    """The model has about the requested number of parameters."""
    with torch.device("meta"):
        model = Gpt.of_size(params)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(params, rel=0.15)


def test_too_small() -> None:
    """Below a certain size there is no such model."""
    with pytest.raises(OptionError, match="at least 100000"):
        Gpt.of_size(10)
