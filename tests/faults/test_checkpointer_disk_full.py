"""The disk becomes full while a checkpoint is written in the background."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from iobench import Checkpointer, KeepLast
from iobench.errors import TransferError
from iobench.units import MIB
from iobench.writers.base import Writer

pytestmark = pytest.mark.root


def test_disk_full(make: Callable[..., Writer], new_filesystem) -> None:
    """The trainer goes on and is told at the next call; the last checkpoint stays; room helps."""
    root: Path = new_filesystem("ext4", 48 * MIB)
    state = {"w": torch.zeros(2 * MIB), "step": 0}
    with Checkpointer(root / "run", writer=make(root), keep=KeepLast(1)) as ckpt:
        ckpt.save_async(state, 1)
        ckpt.wait()
        (root / "filler").write_bytes(bytes(26 * MIB))
        state["w"].fill_(2)
        save = ckpt.save_async(state, 2)
        state["w"].fill_(3)  # trains on
        with pytest.raises(TransferError) as caught:
            ckpt.wait()
        assert caught.value.errno == errno.ENOSPC
        assert save.status == "failed"
        assert {path.name for path in (root / "run").iterdir()} == {"step-1", ".iobench-lock"}
        assert not ckpt.load()["w"].any()
        (root / "filler").unlink()
        ckpt.save_async(state, 3)
        ckpt.wait()
        assert ckpt.steps() == [3]
        assert (ckpt.load()["w"] == 3).all()
