"""docs/checkpointer.md: every code block runs, and the trainer of the first one resumes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import iobench

_PAGE = Path(__file__).parents[3] / "docs" / "checkpointer.md"
_TRAINER, _PREPARE, _LAZY = re.findall(
    r"^```python\n(.*?)^```$", _PAGE.read_text(), re.DOTALL | re.MULTILINE
)


class _Training:
    """What the examples assume: a model, an optimizer, data and a step."""

    def __init__(self, steps: int) -> None:
        self.seen: list[int] = []
        self.model = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(self.model.weight)
        torch.nn.init.zeros_(self.model.bias)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.data = range(steps)

    def train(self, batch: int) -> None:
        self.seen.append(batch)
        self.optimizer.zero_grad()
        self.model(torch.tensor([batch % 7 - 3.0])).square().sum().backward()
        self.optimizer.step()

    def run(self, code: str, **more: Any) -> None:
        """Run an example of the page."""
        names = {"model": self.model, "optimizer": self.optimizer, "data": self.data}
        exec(compile(code, str(_PAGE), "exec"), {**names, "train": self.train, **more})


@pytest.fixture(autouse=True)
def _here(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, with the writer.toml that the examples name."""
    monkeypatch.chdir(runs)
    Path("writer.toml").write_text(iobench.dump_writer(iobench.load_writer("buffered")))


def test_the_trainer_resumes() -> None:
    """After a restart it continues from its latest checkpoint, to the same weights."""
    code = _TRAINER.replace("Every(500)", "Every(5)")
    assert code != _TRAINER
    whole = _Training(11)
    for batch in whole.data:
        whole.train(batch)
    first, second = _Training(7), _Training(11)
    first.run(code)
    second.run(code)
    assert first.seen == list(range(7))
    assert second.seen == list(range(5, 11))
    assert torch.equal(second.model.weight, whole.model.weight)


def test_the_files_of_a_checkpoint() -> None:
    """The page lists all of them."""
    with iobench.Checkpointer("runs/a", writer="buffered") as ckpt:
        ckpt.save({"w": torch.ones(3)}, 500)
    listed = re.findall(r"^    (runs/a/\S+)", _PAGE.read_text(), re.MULTILINE)
    assert {str(one) for one in Path("runs").rglob("*") if one.is_file()} == set(listed)


def test_prepare() -> None:
    """The slots are there for the state of the trainer, which is saved right."""
    training = _Training(0)
    training.train(1)
    with iobench.Checkpointer("runs/a", writer="buffered") as ckpt:
        training.run(_PREPARE, ckpt=ckpt)
        ckpt.save_async({"model": training.model.state_dict(), "step": 0}, 1)
        assert torch.equal(ckpt.load()["model"]["weight"], training.model.weight)


def test_lazy() -> None:
    """The copy ends before the optimizer changes the copied tensors."""
    training = _Training(0)
    with iobench.Checkpointer("runs/a", writer="buffered", lazy=True) as ckpt:
        ckpt.save_async(training.model.state_dict(), 1)
        loss = training.model(torch.ones(1)).sum()
        training.run(_LAZY, loss=loss, ckpt=ckpt)
        assert ckpt.load()["weight"].item() == 1
    assert training.model.weight.item() != 1
