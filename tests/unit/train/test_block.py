"""A block reports a checkpoint that does not restore the training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from iobench.bench.counters.sampler import FileSampler
from iobench.results import TrainBlock
from iobench.train import block as blocks_module
from iobench.train.arm import choose_arms
from iobench.train.block import TrainingBlocks, timed_step
from iobench.train.saver import Saver
from iobench.train.trainer import Trainer


class _InMemory(Saver):
    """Keeps the last state; with `spoil`, one of its bytes changes."""

    def __init__(self, *, spoil: bool) -> None:
        self._spoil = spoil
        self.saved: list[tuple[int, int]] = []

    def save(self, state: Any, step: int) -> None:
        self.saved.append((step, len(state["optimizer"]["state"])))
        self._state = copy.deepcopy(state)

    def load(self) -> Any:
        self._state["ballast"][5] += int(self._spoil)
        return self._state


def _run(
    saver: Saver, directory: Path, *, every: int, monkeypatch: pytest.MonkeyPatch
) -> TrainBlock:
    """Run a block of 3 steps with `saver`, and its resume."""
    monkeypatch.setattr(blocks_module, "saver_for", lambda *_: saver)
    arm = choose_arms("buffered", "sync")[0][1]
    with FileSampler(["/proc/meminfo", "/proc/self/status"]) as sampler:
        blocks = TrainingBlocks(
            trainer=Trainer(100_000, ballast_bytes=100, threads=1),
            steps=3,
            every=every,
            simulated_s=0.0,
            size_bytes=100,
            sampler=sampler,
            run_id="r",
        )
        return blocks.run(arm, directory, repetition=0, order=0)


class _Clock:
    """Time that passes only in `take`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


@pytest.mark.parametrize(
    ("update_s", "shortest_s", "step_s"),
    [(0.25, 0.25, 1.0), (0.25, 0.5, 1.0), (0.5, 0.25, 1.25), (0.25, 0.0, 1.25), (2.0, 2.0, 2.5)],
)
def test_a_simulated_step_is_the_whole_step(
    update_s: float, shortest_s: float, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 s, with half a second of forward and backward. The wait for a copy is added."""
    clock = _Clock()
    monkeypatch.setattr(blocks_module, "time", clock)

    class Training:
        update_s = shortest_s

        def step(self, before_update: Callable[[], None]) -> float:
            clock.sleep(0.5)
            before_update()
            clock.sleep(update_s)
            return 3.0

    class Copying(_InMemory):
        def before_update(self) -> None:
            clock.sleep(4.0)

    assert timed_step(Training(), Copying(spoil=False), 1.0) == (3.0, step_s)
    assert clock.now_s == step_s + 4.0


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [False, True])
def test_resume(spoil: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One byte that differs after a resume is reported; the losses alone would not show it."""
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = _run(_InMemory(spoil=spoil), tmp_path, every=2, monkeypatch=monkeypatch)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)
    assert found.losses_equal
    assert found.resumed_equal is not spoil


@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2]), (2, [0, 1]), (3, [0, 1])])
def test_checkpoints(
    every: int, steps: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There is none after the last step. The one before the clock starts has the size of the
    others."""
    saver = _InMemory(spoil=False)
    _run(saver, tmp_path, every=every, monkeypatch=monkeypatch)
    taken, sizes = zip(*saver.saved, strict=True)
    assert list(taken) == steps
    assert min(sizes) == max(sizes) > 0
