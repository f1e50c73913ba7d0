"""docs/checkpointer.md: every code block runs, and the trainer of the first one resumes."""

from __future__ import annotations

import re
import shutil
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import iobench
from iobench.errors import TransferError
from iobench.writers.buffered import BufferedWriter
from iobench.writers.transfer import Transfer

_PAGE = Path(__file__).parents[3] / "docs" / "checkpointer.md"
_TRAINER, _PREPARE, _LAZY, *_RECIPES = re.findall(
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
        ckpt.save({"w": torch.ones(3)}, 499)
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


def _told(code: str) -> list[str]:
    """Run a recipe, and a save that is told to it; return the warnings."""
    names: dict[str, Any] = {}
    shutil.rmtree("runs/a", ignore_errors=True)
    exec(compile(code, str(_PAGE), "exec"), names)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        writer = _Disk()
        with iobench.Checkpointer("runs/a", writer=writer, on_event=names["on_event"]) as ckpt:
            ckpt.save_async({"w": torch.ones(1 << 18)}, 5)
            ckpt.wait()
            writer.full = True
            ckpt.save_async({"w": torch.ones(1 << 18)}, 6)
            with pytest.raises(TransferError, match="no space"):
                ckpt.wait()
    return [str(one.message) for one in said]


class _Disk(BufferedWriter):
    full = False

    def write_many(self, *args: Any, **options: Any) -> Transfer:
        if self.full:
            raise TransferError("no space")
        return super().write_many(*args, **options)


class _Board:
    """What the recipes call of SummaryWriter and of a wandb run, with the same parameters."""

    def __init__(self, where: str = "") -> None:
        self.where = where
        self.values: dict[str, Any] = {}
        self.alerts: list[tuple[str, str]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        assert global_step == 5
        self.values[tag] = scalar_value

    def log(self, data: dict[str, Any]) -> None:
        self.values.update(data)

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))


class _Tracer:
    """`start_span` and `end` of OpenTelemetry: times are nanoseconds since the epoch."""

    def __init__(self) -> None:
        self.spans: dict[str, list[int]] = {}

    def start_span(self, name: str, *, start_time: int, attributes: dict[str, Any]) -> Any:
        assert attributes == {"step": 5}
        times = self.spans[name] = [start_time]
        return SimpleNamespace(end=lambda end_time: times.append(end_time))


def test_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs without a warning, and gets the figures of the save that was committed."""
    board, run, tracer = _Board(), _Board(), _Tracer()
    stand_ins = {
        "torch.utils.tensorboard": SimpleNamespace(SummaryWriter=lambda _where: board),
        "wandb": SimpleNamespace(init=lambda project: run),  # noqa: ARG005 -- wandb's name
        "opentelemetry": SimpleNamespace(trace=SimpleNamespace(get_tracer=lambda _name: tracer)),
    }
    for name, one in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, one)
    before_s = time.time()
    assert [_told(code) for code in _RECIPES] == [[], [], []]
    assert {*board.values} == {f"checkpoint/{n}" for n in ("stall_s", "persist_s", "GiB_per_s")}
    assert run.values["checkpoint/step"] == 5
    assert run.values["checkpoint/persist_s"] > 0
    assert run.alerts == [("checkpoint 6 failed", "no space")]
    (copied, write, commit) = (tracer.spans[f"save.{n}"] for n in ("copy", "write", "commit"))
    assert before_s * 1e9 < copied[0] < copied[1]
    assert copied[0] < write[0] < write[1] == commit[0] < commit[1] < time.time() * 1e9


def test_lazy() -> None:
    """The copy ends before the optimizer changes the copied tensors."""
    training = _Training(0)
    with iobench.Checkpointer("runs/a", writer="buffered", lazy=True) as ckpt:
        ckpt.save_async(training.model.state_dict(), 1)
        loss = training.model(torch.ones(1)).sum()
        training.run(_LAZY, loss=loss, ckpt=ckpt)
        assert ckpt.load()["weight"].item() == 1
    assert training.model.weight.item() != 1
