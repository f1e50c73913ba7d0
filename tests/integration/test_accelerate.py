"""Accelerate's save_state and load_state with our writers, compared with the stock methods."""

import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.recording import Recording
from support.torchrun import torchrun

from iobench.errors import UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from iobench.integrations.accelerate import attach, detach

pytestmark = pytest.mark.filterwarnings("ignore")  # the warnings of others


class Counter:
    """A state of the user's own."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Job:
    """A model, an optimizer, a schedule and a counter under one Accelerator."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, **options)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        self.counter = Counter()
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            self.model, optimizer, schedule
        )
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, steps: int) -> list[float]:
        """Losses; the data and the dropout come from the random state."""
        losses = []
        for _ in range(steps):
            data = torch.randn(4, 9) + random.random() + np.random.rand()
            loss = torch.nn.functional.mse_loss(self.model(data[:, :8]).squeeze(), data[:, 8])
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.counter.value += 1
            losses.append(loss.item())
        return losses


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


FILES = [
    *("custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin", "random_states_0.pkl"),
    "scheduler.bin",
]


@pytest.mark.parametrize("safe", [True, False])
def test_each_side_loads_the_other(safe: bool, tmp_path) -> None:
    """All of the state goes over the writer, both ways, and training goes on as it did."""
    job, writer = Job(), Recording()
    job.train(3)
    job.accelerator.save_state(str(tmp_path / "stock"), safe_serialization=safe)
    hooked: list[str] = []
    job.accelerator.register_save_state_pre_hook(lambda *a: hooked.append(a[2]))
    attach(job.accelerator, writer)
    saved = job.accelerator.save_state(str(tmp_path / "ours"), safe_serialization=safe)
    assert saved == tmp_path / "ours"
    assert len(hooked) == 1
    wanted = job.train(4)
    files = FILES if safe else [*FILES[:1], "optimizer.bin", "pytorch_model.bin", *FILES[3:]]
    assert names(tmp_path / "ours") == names(tmp_path / "stock") == files
    assert sorted(writer.written) == files
    other = Job()
    other.accelerator.load_state(str(tmp_path / "ours"))
    assert other.counter.value == 3
    assert other.train(4) == wanted
    attach(other.accelerator, writer)
    other.accelerator.load_state(str(tmp_path / "stock"))
    assert sorted(writer.read_) == files
    assert other.train(4) == wanted
    with pytest.raises(UsageError, match="already"):
        attach(other.accelerator, writer)
    detach(other.accelerator)
    other.accelerator.save_state(str(tmp_path / "again"))
    assert len(writer.written) == len(files)


def test_automatic_names(tmp_path) -> None:
    """Numbered checkpoints, the oldest removed once the new one is there, the newest loaded."""

    def settings() -> ProjectConfiguration:
        return ProjectConfiguration(
            project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2
        )

    job = Job(project_config=settings())
    attach(job.accelerator, "buffered")
    for number in range(3):
        job.train(1)
        assert job.accelerator.save_state() == tmp_path / "checkpoints" / f"checkpoint_{number}"
    assert names(tmp_path) == ["checkpoints"]
    assert names(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_2"]
    job.accelerator.project_configuration.iteration = 2
    with pytest.raises(ValueError, match="exists"):
        job.accelerator.save_state()
    other = Job(project_config=settings())
    attach(other.accelerator, "buffered")
    other.accelerator.load_state()
    assert other.counter.value == 3


_RANKS = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = {tests!r}
from test_accelerate import *
job, writer = Job(), Recording()
attach(job.accelerator, writer)
job.train(1)
job.accelerator.save_state({place!r})
job.accelerator.load_state({place!r})
job.train(1)
writer.dies = "scheduler.bin"  # rank 0 writes it
job.accelerator.save_state({place!r})
"""


def test_two_ranks_killed_in_the_middle_of_a_save(tmp_path) -> None:
    """Both save to one directory; the one of before is whole, and the next save clears up."""
    place, script = tmp_path / "run" / "last", tmp_path / "script.py"
    script.write_text(
        _RANKS.format(
            tests=[str(Path(__file__).parent), str(Path(__file__).parents[1])], place=str(place)
        )
    )
    done = torchrun(
        ["--standalone", "--nproc-per-node=2", script], timeout=120, ACCELERATE_USE_CPU="true"
    )
    assert "SIGKILL" in done.stderr or "exitcode  : -9" in done.stderr, done.stderr
    left, last = names(place.parent)
    assert re.fullmatch(r"\.last\.[0-9a-f]+\.iobench-staging", left)
    assert last == "last"
    assert names(place) == sorted([*FILES, "random_states_1.pkl"])
    job = Job()
    attach(job.accelerator, "buffered")
    job.accelerator.load_state(str(place))
    assert job.counter.value == 1
    job.accelerator.save_state(str(place))
    assert names(place.parent) == ["last"]
