"""Never mixed, never stale: what is saved is the state at the call, under any schedule.

A trainer changes its tensors in place right after each call returns, while the writer,
with random delays, is anywhere in earlier saves. Whatever was committed is then read back.
"""

import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.captured import captured

from iobench import Checkpointer, KeepLast, load_checkpoint
from iobench.writers.buffered import BufferedWriter
from iobench.writers.transfer import Transfer

_SCHEDULES, _PARTS = 2000, 16  # `make test` runs one part
_STEPS = 6


class _Delayed(BufferedWriter):
    """Spends a random time, of none to a millisecond, before, between and after its files."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def write_many(self, images: Any, target: Any, **options: Any) -> Transfer:
        parts = []
        for image in images:
            self._pause()
            parts.append(self.write(image, target, **options))
            self._pause()
        return Transfer.total(parts)

    def _pause(self) -> None:
        # Yielding to the trainer matters, not how long: it runs until it gives way.
        deadline = self._random.choice((0, 0, 20, 100))
        for _ in range(deadline):
            np.random.default_rng(0)


class _Training:
    """A state in which every element is the step it belongs to, changed in place by `step`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.weights = torch.zeros(self.random.choice((1, 7, 1000)))
        self.flat = torch.zeros(64)
        self.array = np.zeros(9)
        self.count = 0

    def state(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "tied": self.weights,
            "parts": [self.flat[:32], self.flat[16:48], self.flat.view(8, 8).t()],
            "array": self.array,
            "optimizer": {0: {"step": torch.tensor(float(self.count)), "lr": float(self.count)}},
            "count": self.count,
        }

    def step(self) -> None:
        """Change every element in place."""
        self.count += 1
        for changed in (self.weights, self.flat):
            changed.add_(1)
        self.array += 1


def _values(state: Any) -> set[float]:
    """Every number in a state."""
    if isinstance(state, torch.Tensor | np.ndarray):
        return set(state.flatten().tolist())
    if isinstance(state, dict | list):
        items = state.values() if isinstance(state, dict) else state
        return set().union(*map(_values, items))
    return {state}


def _train(seed: int, directory: Path) -> Checkpointer:
    training = _Training(seed)
    choose = training.random.choice
    options: dict[str, Any] = {
        "slots": choose((1, 2, 3)),
        "on_full": choose(("wait", "skip", "drop")),
        "lazy": choose((True, False)),
        "keep": choose((None, KeepLast(1), KeepLast(2))),
    }
    with Checkpointer(directory, writer=_Delayed(seed), **options) as ckpt:
        for step in range(1, _STEPS + 1):
            ckpt.before_optimizer_step()
            training.step()
            match choose(("async", "async", "async", "sync", "load", "wait", "none")):
                case "async":
                    ckpt.save_async(training.state(), step)
                case "sync":
                    ckpt.save(training.state(), step)
                case "load" if ckpt.latest() is not None:
                    assert _values(ckpt.load()) == {float(ckpt.latest() or 0)}
                case "wait":
                    ckpt.wait()
    return ckpt


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, _PARTS))]
)
def test_never_mixed_never_stale(runs, part: int) -> None:
    """Each committed checkpoint holds its own step's values and no other, whatever overlapped."""
    statuses: set[str] = set()
    reader = BufferedWriter()
    for seed in range(part, _SCHEDULES, _PARTS):
        directory = runs / str(seed)
        ckpt = _train(seed, directory)
        committed = {save.step for save in ckpt.saves if save.status == "committed"}
        statuses |= {save.status for save in ckpt.saves}
        held = ckpt.steps()
        assert set(held) <= committed, f"schedule {seed}"
        assert max(held, default=None) == max(committed, default=None), f"schedule {seed}"
        for step in held:
            loaded = load_checkpoint(directory, step, writer=reader)
            assert _values(loaded) == {float(step)}, f"schedule {seed}"
        shutil.rmtree(directory)
    assert statuses == {"committed", "skipped", "dropped"}


_SAVES = 250

_CHILD = """
import gc, sys
import torch
from iobench import Checkpointer, KeepLast

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

state = {"model": {str(i): torch.zeros(20_000) for i in range(10)}, "step": 0}
lazy = sys.argv[2] == "lazy"
ckpt = Checkpointer(sys.argv[1], writer="hybrid", slots=3, keep=KeepLast(2), lazy=lazy)
for step in range(int(sys.argv[3])):
    ckpt.before_optimizer_step()
    for tensor in state["model"].values():
        tensor.add_(1)
    state["step"] = step
    ckpt.save_async(state, step)
    if step == 9:
        ckpt.wait()
        early = resident()
ckpt.wait()
print(early, resident())
ckpt.close()
"""


@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.exhaustive), "lazy"])
def test_memory_is_steady(mode: str) -> None:
    """After 250 saves the resident memory is within 1% of that after the first ten."""
    shared = Path("/dev/shm")  # where syncs cost nothing
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as made:
        command = [sys.executable, "-c", _CHILD, f"{made}/runs", mode, str(_SAVES)]
        done = captured(command, check=True)
    early, late = map(int, done.stdout.split())
    assert late <= early * 1.01, f"{early} pages after 10 saves, {late} after {_SAVES}"
