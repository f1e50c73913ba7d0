"""Checkpointer(reuse_files=True): a checkpoint takes over the space of one that was dropped."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import iobench
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import TransferError
from iobench.writers.buffered import BufferedWriter

_TENSORS = "tensors.safetensors"


def _state(step: int, size: int = 5000) -> dict[str, Any]:
    return {"w": torch.full((size,), float(step)), "step": step}


def _checkpointer(runs: Path, **options: Any) -> iobench.Checkpointer:
    return iobench.Checkpointer(runs, keep=iobench.KeepLast(1), reuse_files=True, **options)


def _inode(runs: Path, step: int) -> int:
    return (runs / f"step-{step}" / _TENSORS).stat().st_ino


def _hidden(runs: Path) -> list[str]:
    return [name for name in os.listdir(runs) if name.startswith(".step-")]


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_every_second_checkpoint_has_the_same_file(runs: Path, how: str) -> None:
    """States may grow and shrink. One dropped checkpoint keeps its space, and none after close."""
    inodes = []
    with _checkpointer(runs) as ckpt:
        for step, size in enumerate([5000, 5000, 9000, 100, 5000], start=1):
            getattr(ckpt, how)(_state(step, size), step)
            ckpt.wait()
            inodes.append(_inode(runs, step))
            assert torch.equal(iobench.load_checkpoint(runs)["w"], _state(step, size)["w"])
            assert len(_hidden(runs)) == (1 if step > 1 else 0)
            assert ckpt.steps() == [step]
    assert inodes[2] == inodes[0] == inodes[4]
    assert inodes[3] == inodes[1] != inodes[0]
    assert _hidden(runs) == []
    assert sorted(os.listdir(runs / "step-5")) == ["manifest.json", "state.json", _TENSORS]


def test_a_reader_of_a_dropped_checkpoint_keeps_its_bytes(runs: Path) -> None:
    with _checkpointer(runs) as ckpt:
        ckpt.save(_state(1), 1)
        file = runs / "step-1" / _TENSORS
        want = file.read_bytes()
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=1) as mapped:
            for step in (2, 3, 4):
                ckpt.save(_state(step), step)
            assert mapped[:] == want


def test_a_checkpoint_that_was_replaced_by_a_link_stays(runs: Path) -> None:
    """Who moved a checkpoint elsewhere keeps it there."""
    moved = runs / "moved"
    with _checkpointer(runs) as ckpt:
        ckpt.save(_state(1), 1)
        (runs / "step-1").rename(moved)
        (runs / "step-1").symlink_to(moved)
        before = (moved / _TENSORS).read_bytes()
        for step in (2, 3):
            ckpt.save(_state(step), step)
        assert (moved / _TENSORS).read_bytes() == before
    assert sorted(os.listdir(runs)) == [".iobench-lock", "moved", "step-3"]


def test_without_room_the_space_is_freed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DirectoryStore, "_free_bytes", lambda _: 20_000)
    with _checkpointer(runs) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(_state(step), step)
            assert _hidden(runs) == []


def test_a_failed_save_loses_the_space_and_nothing_else(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _checkpointer(runs, writer="buffered") as ckpt:
        for step in (1, 2):
            ckpt.save(_state(step), step)
        with monkeypatch.context() as patched:
            patched.setattr(BufferedWriter, "_send", _full)
            with pytest.raises(TransferError):
                ckpt.save(_state(3), 3)
        assert iobench.load_checkpoint(runs)["step"] == 2
        ckpt.save(_state(4), 4)
        assert iobench.load_checkpoint(runs)["step"] == 4
    assert _hidden(runs) == []


def _full(*_: Any) -> None:
    raise TransferError("no space left")


def test_a_name_that_may_not_be_durable_is_not_written_over(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut could undo the rename, and show the old checkpoint with new bytes."""
    with _checkpointer(runs) as ckpt:
        ckpt.save(_state(1), 1)
        inode = _inode(runs, 1)
        with monkeypatch.context() as patched:
            patched.setattr(DirectoryStore, "_sync", _failed_sync)
            with pytest.warns(RuntimeWarning, match="not synced"):
                ckpt.save(_state(2), 2)
        ckpt.save(_state(3), 3)
        assert _inode(runs, 3) != inode
    assert _hidden(runs) == []


def _failed_sync(_: DirectoryStore) -> None:
    raise TransferError("not synced")
