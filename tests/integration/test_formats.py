"""A real model and its optimizer through the formats and back: training goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from iobench.formats import safetensors, torch_file
from iobench.writers import registry
from iobench.writers.base import Writer


class _Trainer:
    """A small transformer, AdamW, and data that depends on the step alone."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(50, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.model = torch.nn.ModuleDict({"embed": self.embed, "layer": layer})
        self.head = torch.nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight  # tied, as in most language models
        self.model["head"] = self.head
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        """The loss of each step."""
        losses = []
        for _ in range(steps):
            data = torch.Generator().manual_seed(self.step)
            tokens = torch.randint(0, 50, (4, 9), generator=data)
            hidden = self.model["layer"](self.embed(tokens[:, :-1]))
            loss = torch.nn.functional.cross_entropy(
                self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten()
            )
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


@pytest.fixture(params=["odirect", "uring", "uncached", "buffered"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Writer:
    made = registry.make(request.param, block_size="16KiB")
    answer = made.available(tmp_path)
    if not answer.ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    return made


@pytest.mark.parametrize("crc", [True, False])
def test_training_resumes_from_a_torch_file(crc: bool, writer: Writer, tmp_path: Path) -> None:
    """Restored from one torch file, training gives the very losses it gives uninterrupted."""
    trainer = _Trainer(seed=1)
    trainer.train(3)
    torch_file.save(trainer.state(), "step-3.pt", tmp_path, writer, crc=crc)
    uninterrupted = trainer.train(3)

    state, _ = torch_file.load("step-3.pt", tmp_path, writer)
    resumed = _Trainer(seed=2)
    resumed.restore(state)
    assert resumed.train(3) == uninterrupted
    stock = _Trainer(seed=3)
    stock.restore(torch.load(tmp_path / "step-3.pt"))
    assert stock.train(3) == uninterrupted


def test_training_resumes_from_safetensors(writer: Writer, tmp_path: Path) -> None:
    """Weights from safetensors and the optimizer from a torch file, as the Trainer keeps them."""
    trainer = _Trainer(seed=1)
    trainer.train(3)
    state = trainer.state()
    weights = {name: tensor for name, tensor in state["model"].items() if name != "head.weight"}
    safetensors.save(weights, "model.safetensors", tmp_path, writer, metadata={"format": "pt"})
    torch_file.save(state["optimizer"], "optimizer.pt", tmp_path, writer)
    uninterrupted = trainer.train(3)

    model, _ = safetensors.load("model.safetensors", tmp_path, writer)
    model["head.weight"] = model["embed.weight"]
    optimizer, _ = torch_file.load("optimizer.pt", tmp_path, writer)
    resumed = _Trainer(seed=2)
    resumed.restore({"model": model, "optimizer": optimizer, "step": 3})
    assert resumed.train(3) == uninterrupted


def test_other_weights_give_other_losses() -> None:
    """Training depends on the weights, so equal losses above prove that they came back."""
    assert _Trainer(seed=1).train(3) != _Trainer(seed=2).train(3)
