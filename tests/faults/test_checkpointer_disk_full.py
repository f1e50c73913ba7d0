"""The disk becomes full while a checkpoint is written in the background."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from iobench import Checkpointer, KeepLast
from iobench.errors import TransferError, UnavailableError
from iobench.units import MIB
from iobench.writers.base import Writer

pytestmark = pytest.mark.root


@pytest.mark.parametrize("budget", [None, "2MiB"])
def test_disk_full(make: Callable[..., Writer], new_filesystem, budget: str | None) -> None:
    """The trainer goes on and gets the error at the next call. The last checkpoint stays."""
    root: Path = new_filesystem("ext4", 48 * MIB)
    state = {"w": torch.zeros(2 * MIB), "step": 0}
    keep = KeepLast(1)
    with Checkpointer(root / "run", writer=make(root), keep=keep, budget=budget) as ckpt:
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


def test_opened_on_a_full_disk(make: Callable[..., Writer], new_filesystem) -> None:
    """It loads if the writer can be tried without free space; otherwise the error asks for space.
    No lock stays."""
    root: Path = new_filesystem("ext4", 32 * MIB)
    writer = make(root)
    with Checkpointer(root / "run", writer=writer) as ckpt:
        ckpt.save({"step": 1}, 1)
    with (root / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    if writer.available(root).ok:
        with Checkpointer(root / "run", writer=writer) as ckpt:
            assert ckpt.load() == {"step": 1}
            with pytest.raises(TransferError, match="No space left"):
                ckpt.save({"w": torch.zeros(MIB)}, 2)
    else:
        with pytest.raises(UnavailableError, match=r"No space left on device\)\. Make room there"):
            Checkpointer(root / "run", writer=writer)
    (root / "filler").unlink()
    with Checkpointer(root / "run", writer=writer) as ckpt:
        assert ckpt.load() == {"step": 1}
        ckpt.save({"step": 2}, 2)
