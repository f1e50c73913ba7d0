"""Savers report every checkpoint of a block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from iobench.checkpointer import saving
from iobench.peers.torch_save import TorchSave
from iobench.train.arm import arm_of
from iobench.train.saver import saver_for
from iobench.writers.transfer import Transfer

_STATE = {"weight": torch.arange(10)}


@pytest.mark.parametrize("mode", ["sync", "async=1", "lazy=1", "memory=1", "spill=1"])
def test_more_saves_than_a_checkpointer_remembers(
    mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All of them are reported, oldest first, with their status."""
    monkeypatch.setattr(saving, "_REMEMBERED", 2)
    saver = saver_for(arm_of(f"buffered {mode}"), tmp_path / "runs")
    for step in range(5):
        saver.save(_STATE, step)
        saver.before_update()
    saver.wait()
    saves = saver.saves()
    saver.close()
    assert [(one.step, one.status) for one in saves] == [(step, "committed") for step in range(5)]
    assert all(one.stall_s > 0 for one in saves)


@pytest.mark.parametrize(("mode", "waiting"), [("memory=2", 2), ("spill=2", 6)])
def test_memory_holds_so_many_saves(
    mode: str, waiting: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one that is being written is one of them. All are written in the end."""
    go_on, arm = threading.Event(), arm_of(f"buffered {mode}")
    write = arm.by.write_many  # type: ignore[union-attr]  # a writer

    def gated(*given: Any, **options: Any) -> Transfer:
        assert go_on.wait(60)
        return write(*given, **options)

    monkeypatch.setattr(arm.by, "write_many", gated)
    saver = saver_for(arm, tmp_path / "runs")
    for step in range(waiting):
        saver.save(_STATE, step)
    assert saver.persisting
    assert {one.status for one in saver.saves()} <= {"waiting", "writing"}
    threading.Timer(0.05, go_on.set).start()
    saver.save(_STATE, waiting)
    assert go_on.is_set()  # it has waited
    saver.wait()
    assert {one.status for one in saver.saves()} == {"committed"}
    assert len(list((tmp_path / "runs").glob("step-*"))) == waiting + 1
    saver.close()


def test_a_save_that_a_checkpointer_forgot_is_persisting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Until it is durable, whatever is saved after it."""
    written = threading.Event()
    monkeypatch.setattr("iobench.linux.yield_to_others", lambda _: written.wait(60))
    monkeypatch.setattr(saving, "_REMEMBERED", 0)
    saver = saver_for(arm_of("buffered async=1"), tmp_path / "runs")
    saver.save(_STATE, 1)
    before = saver.persisting
    written.set()
    saver.wait()
    after = saver.persisting
    saver.close()
    assert (before, after) == (True, False)


def test_impatience_while_stock_saves(
    impatience: Callable[[threading.Event], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Ctrl-C twice during close: its thread uses the directory until it has ended."""
    go_on, save = threading.Event(), TorchSave.save

    def slow(*arguments: object) -> None:
        go_on.wait(10)
        save(*arguments)

    monkeypatch.setattr(TorchSave, "save", slow)
    saver = saver_for(arm_of("peer:torch-save async"), tmp_path / "runs")
    saver.save(_STATE, 1)
    with impatience(go_on):
        saver.close()
    assert [one.status for one in saver.saves()] == ["committed"]
    assert not saver.persisting


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("peer", ["torch-save", "dcp"])
def test_stock_keeps_the_state_of_the_save(peer: str, mode: str, tmp_path: Path) -> None:
    """Nested, with values that are no tensors; the one checkpoint that stays is the last one."""
    weight = torch.arange(10)
    state: dict[str, Any] = {"model": {"weight": weight}, "groups": [{"lr": 0.5}], "steps": 0}
    saver = saver_for(arm_of(f"peer:{peer} {mode}"), tmp_path / "runs")
    for step in (1, 2):
        state["steps"] = step
        saver.save(state, step)
        if mode == "async":
            weight.add_(1)
    saver.close()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["step-2"]
    found = saver.load()
    assert found["model"]["weight"].tolist() == [*range(mode == "async", 10 + (mode == "async"))]
    assert (found["groups"], found["steps"]) == ([{"lr": 0.5}], 2)
