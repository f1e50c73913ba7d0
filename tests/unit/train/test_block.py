"""A block notices a checkpoint that does not bring training back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from iobench.bench.sampler import FileSampler
from iobench.train import block as blocks_module
from iobench.train.arm import choose_arms
from iobench.train.block import Blocks
from iobench.train.saver import Saver
from iobench.train.trainer import Trainer


class _InMemory(Saver):
    """Keeps the last state; with `spoil`, one byte of it comes back other than it was."""

    def __init__(self, *, spoil: bool) -> None:
        self._spoil = spoil

    def save(self, state: Any, step: int) -> None:
        self._state = copy.deepcopy(state)

    def wait(self) -> None: ...

    @property
    def persisting(self) -> bool:
        return False

    def saves(self) -> tuple[()]:
        return ()

    def load(self) -> Any:
        self._state["ballast"][5] += int(self._spoil)
        return self._state

    def close(self) -> None: ...


@pytest.mark.parametrize("spoil", [False, True])
def test_resume(spoil: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One byte that differs after a resume is told; the losses alone would not show it."""
    monkeypatch.setattr(blocks_module, "saver_for", lambda *_: _InMemory(spoil=spoil))
    arm = choose_arms("buffered", "sync")[0][1]
    with FileSampler(["/proc/meminfo", "/proc/self/status"]) as sampler:
        blocks = Blocks(
            trainer=Trainer(100_000, ballast_bytes=100),
            steps=3,
            every=2,
            simulated_s=0.0,
            size_bytes=100,
            sampler=sampler,
            run_id="r",
        )
        reference = blocks.reference()
        found = blocks.run(arm, tmp_path, reference, repetition=0, order=0, resume=True)
    assert found.losses_equal
    assert found.resumed_equal is not spoil
