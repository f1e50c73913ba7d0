"""Restores from two tiers: the nearest valid copy, and damaged pieces from the other one."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiers import SIZE, damage, settled, state, until

from iobench import Checkpointer, Remote
from iobench.errors import DataMismatchError
from iobench.remote import tiered_store
from iobench.remote.file_copier import DrainStep
from iobench.remote.tiered_store import RemoteList
from iobench.units import MIB

_SMALL = 1000

pytestmark = pytest.mark.filterwarnings("ignore:copies to:RuntimeWarning")


def _saved(local: Path, remote: Any, what: Any = None) -> None:
    """Save a checkpoint of step 1 to both tiers."""
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        ckpt.save(state(1) if what is None else what, 1)
        until(lambda: settled(ckpt))


def test_a_piece_is_read_from_the_other_tier(local: Path, remote: Path) -> None:
    """Only the damaged piece comes from the remote tier."""
    what = {name: torch.full((SIZE // 4,), float(number)) for number, name in enumerate("abcd")}
    _saved(local, remote, what)
    file = local / "step-1" / "tensors.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-100, 2)
        opened.write(b"\xff" * 10)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        with pytest.warns(RuntimeWarning, match="in part: tensors.safetensors is damaged, 1 chec"):
            loaded = ckpt.load()
        assert ckpt.loaded is not None
        sources = ckpt.loaded.sources
    assert {name: loaded[name].unique().tolist() for name in "abcd"} == {
        name: [float(number)] for number, name in enumerate("abcd")
    }
    assert sources[str(remote)] == "read 4.77 MiB"
    assert "damaged" in sources[str(local)]


def test_damage_in_both_tiers(local: Path, remote: Path) -> None:
    """The same piece: it is an error, and never a wrong byte."""
    _saved(local, remote)
    for tier in (local, remote):
        damage(tier / "step-1" / "tensors.safetensors")
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt, pytest.raises(DataMismatchError):
        ckpt.load()


def test_each_tier_has_another_damaged_piece(local: Path, remote: Path) -> None:
    """Every piece is right in one of them, and the state is whole."""
    what = {name: torch.full((SIZE // 4,), float(number)) for number, name in enumerate("abcd")}
    _saved(local, remote, what)
    for tier, at, whence in ((local, -100, 2), (remote, MIB, 0)):
        with (tier / "step-1" / "tensors.safetensors").open("r+b") as opened:
            opened.seek(at, whence)
            opened.write(b"\xff" * 10)
    with (
        Checkpointer(local, tiers=[Remote(remote)]) as ckpt,
        pytest.warns(RuntimeWarning, match="in part"),
    ):
        loaded = ckpt.load()
    assert {name: loaded[name].unique().tolist() for name in "abcd"} == {
        name: [float(number)] for number, name in enumerate("abcd")
    }


def test_a_local_file_that_cannot_be_read(local: Path, remote: Path) -> None:
    """It ends in the middle: the checkpoint is read from the remote tier."""
    _saved(local, remote)
    file = local / "step-1" / "tensors.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        with pytest.warns(RuntimeWarning, match=f"is read from {remote}"):
            loaded = ckpt.load()
        assert ckpt.loaded is not None
        assert ckpt.loaded.sources[str(remote)] == "read"
    assert loaded["w"].unique().tolist() == [1]


def test_a_copy_of_another_save_does_not_help(
    local: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same step, saved anew: the older copy in the remote tier is not used."""
    _saved(local, remote)
    with Checkpointer(local) as ckpt:
        ckpt.remove(1)
        ckpt.save({**state(1), "again": True}, 1)
    copied, original = threading.Event(), DrainStep.send

    def send(step: DrainStep, entry: Any, *, again: bool) -> int | None:
        assert copied.wait(60)
        return original(step, entry, again=again)

    monkeypatch.setattr(DrainStep, "send", send)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        assert ckpt.load()["again"] is True
        assert ckpt.loaded is not None
        assert ckpt.loaded.sources == {str(local): "read"}
        copied.set()


class _LateList:
    """A remote tier whose list is answered when `answer` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer, self.asked = threading.Event(), threading.Event()
        original = RemoteList._listed

        def listed(asking: RemoteList) -> Any:
            self.asked.set()
            assert self.answer.wait(60)
            return original(asking)

        monkeypatch.setattr(RemoteList, "_listed", listed)


def test_a_remote_tier_that_hangs(
    local: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start does not wait for it. A load waits for a while, and the local checkpoint counts."""
    _saved(local, remote, state(1, _SMALL))
    late = _LateList(monkeypatch)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        assert late.asked.wait(60)
        monkeypatch.setattr(tiered_store, "_ANSWER_S", 0.0)
        with pytest.warns(RuntimeWarning, match="no answer within 0 s"):
            assert ckpt.load()["step"] == 1
        late.answer.set()


def test_a_later_save_of_another_node_counts(
    local: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list is waited for, and the older local checkpoint is not returned."""
    _saved(local, remote, state(1, _SMALL))
    with Checkpointer(local.with_name("other"), tiers=[Remote(remote)]) as other:
        other.load()
        other.save(state(2, _SMALL), 2)
    late = _LateList(monkeypatch)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        threading.Timer(0.1, late.answer.set).start()
        assert ckpt.load()["step"] == 2
        ckpt.save(state(3, _SMALL), 3)
        assert ckpt.latest() == 3
