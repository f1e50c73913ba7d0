"""FileCopier: what happens to a copy that is given up, or damaged, meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiers import damage, settled, state, until

from iobench import Checkpointer, KeepLast, Remote, load_checkpoint
from iobench.errors import DataMismatchError
from iobench.remote.drain import Drain
from iobench.remote.file_copier import FileCopier
from iobench.remote.queue import PENDING, Queued
from iobench.remote.remote import RemoteTier
from iobench.remote.remote_copy import DirectoryCopy
from iobench.remote.source_file import LocalDamageError

_SMALL = 1000


@pytest.fixture
def ckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpointer]:
    """Steps 1 and 2 are copied, two are kept. Step 3 waits: the drain's thread does nothing."""
    local, remote = tmp_path / "local", Remote(tmp_path / "remote", keep=KeepLast(2))
    with Checkpointer(local, tiers=[remote]) as one:
        for step in (1, 2):
            one.save(state(step, _SMALL), step)
            until(lambda: settled(one))
        with monkeypatch.context() as patched:
            patched.setattr(Drain, "_work", lambda self: self._limit.stop.wait(0.02))
            one.save(state(3, _SMALL), 3)
            one.wait()
            yield one


def _drain(ckpt: Checkpointer) -> Drain:
    assert ckpt._tier is not None
    return ckpt._tier.drain


def _waiting(ckpt: Checkpointer) -> Queued:
    entry = _drain(ckpt).queue.next()
    assert entry is not None
    return entry


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("step-*")}


@pytest.mark.parametrize("during", ["_together", "publish"])
def test_a_copy_that_is_given_up(
    during: str, ckpt: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not published, and nothing is removed for it, unless all of its bytes were there."""
    drain, entry = _drain(ckpt), _waiting(ckpt)
    kind: Any = FileCopier if during == "_together" else DirectoryCopy
    original = getattr(kind, during)

    def moves(self: Any, *args: Any) -> Any:
        found = original(self, *args)
        assert drain.queue.move(entry, "dropped", of=PENDING)  # the trainer's thread
        return found

    with monkeypatch.context() as patched:
        patched.setattr(kind, during, moves)
        assert drain.copier.copy(entry) is None
    found = drain.queue.get(3)
    assert found is not None
    assert found.state == "dropped"
    names = {"_together": {"step-1", "step-2"}, "publish": {"step-2", "step-3"}}
    assert _names(tmp_path / "remote") == names[during]
    assert load_checkpoint(tmp_path / "remote")["step"] == (2 if during == "_together" else 3)


def test_a_step_that_is_removed_while_it_is_published(
    ckpt: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not stay."""
    drain, entry = _drain(ckpt), _waiting(ckpt)
    original = DirectoryCopy.publish

    def publish(self: DirectoryCopy, manifest: bytes) -> None:
        original(self, manifest)
        drain.queue.forget(3)

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryCopy, "publish", publish)
        assert drain.copier.copy(entry) is None
    assert "step-3" not in _names(tmp_path / "remote")


def test_a_copy_is_recorded_before_it_replaces_others(ckpt: Checkpointer, tmp_path: Path) -> None:
    """The oldest one goes when the new one is there."""
    drain, entry = _drain(ckpt), _waiting(ckpt)
    assert drain.copier.copy(entry) is not None
    assert _names(tmp_path / "remote") == {"step-2", "step-3"}
    assert drain.copier.verify(_waiting(ckpt))
    assert not drain.copier.verify(entry)  # a second one finds another state


def test_a_given_up_copy_is_not_sent(ckpt: Checkpointer) -> None:
    """Not even if the drain's thread had chosen it before."""
    drain, entry = _drain(ckpt), _waiting(ckpt)
    assert drain.queue.move(entry, "dropped", of=PENDING)
    assert drain.copier.copy(entry) is None


def test_a_damaged_remote_copy_goes_after_the_local_one_was_compared(
    ckpt: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it is the only one that is known to have any good piece."""
    drain = _drain(ckpt)
    assert drain.copier.copy(_waiting(ckpt)) is not None
    remote = tmp_path / "remote" / "step-3"
    damage(remote / "tensors.safetensors")
    there, original = {}, FileCopier._together

    def together(self: FileCopier, order: Any, *arguments: Any) -> int:
        there[order["do"]] = remote.exists()
        return original(self, order, *arguments)

    monkeypatch.setattr(FileCopier, "_together", together)
    with pytest.raises(DataMismatchError, match="damaged"):
        drain.copier.verify(_waiting(ckpt))
    assert there == {"read back": True, "compare": True}
    assert not remote.exists()
    assert _waiting(ckpt).state == "waiting"


def test_both_copies_are_damaged(ckpt: Checkpointer, tmp_path: Path) -> None:
    """Both stay: a restore mends each with the pieces of the other."""
    drain = _drain(ckpt)
    assert drain.copier.copy(_waiting(ckpt)) is not None
    for tier in ("local", "remote"):
        damage(tmp_path / tier / "step-3" / "tensors.safetensors")
    with pytest.raises(LocalDamageError, match="damaged"):
        drain.copier.verify(_waiting(ckpt))
    assert _names(tmp_path / "remote") == {"step-2", "step-3"}


def test_a_remove_while_the_tier_begins_anew(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer removes a checkpoint; at the same moment the drain's thread closes the tier."""
    remote = _drain(ckpt).remote
    held = []

    def holds(self: Any, step: int) -> bool:
        del self, step
        held.append(_is_locked(remote))
        return False

    monkeypatch.setattr("iobench.checkpoint.ledger.Ledger.holds", holds)
    remote.remove(77)
    assert held == [True]


def _is_locked(remote: RemoteTier) -> bool:
    """Return whether another thread would wait for the tier."""
    found: list[bool] = []

    def try_it() -> None:
        taken = remote.alone.acquire(blocking=False)
        if taken:
            remote.alone.release()
        found.append(not taken)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return found[0]
