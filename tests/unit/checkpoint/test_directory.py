"""Changes of a run's directory by others: removed steps, links, another directory under its
name."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from iobench import Checkpointer, KeepLast, load_checkpoint
from iobench.checkpoint.store import STAGING_SUFFIX
from iobench.errors import TargetError, TransferError


@pytest.fixture
def ckpt(runs: Path) -> Iterator[Checkpointer]:
    """A Checkpointer that keeps the last two, closed at the end."""
    with Checkpointer(runs / "a", writer="buffered", keep=KeepLast(2)) as made:
        yield made


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {".iobench-lock"}


def _move_away(step: Path, to: Path) -> Path:
    """Move a checkpoint, as if to another disk, and leave a link in its place."""
    moved = to / f"moved-{step.name}"
    step.rename(moved)
    step.symlink_to(moved)
    return moved


def test_steps_removed_by_others(ckpt: Checkpointer, runs: Path) -> None:
    """Retention continues, and remove() raises nothing."""
    for step in (1, 2):
        ckpt.save({"step": step}, step)
    shutil.rmtree(runs / "a" / "step-1")
    for step in (3, 4, 5):
        ckpt.save({"step": step}, step)
    assert ckpt.steps() == [4, 5]
    shutil.rmtree(runs / "a" / "step-4")
    ckpt.remove(4)
    ckpt.save({"step": 4}, 4)


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_removal_that_fails(
    ckpt: Checkpointer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning, once, and no failure of the save; others are removed, and it is tried again."""
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "step-1":
            raise PermissionError(errno.EACCES, "Permission denied", path.name)
        return rename(path, target)

    def save(step: int) -> None:
        getattr(ckpt, how)({"step": step}, step)
        ckpt.wait()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        for step in (1, 2):
            save(step)
        with pytest.warns(
            RuntimeWarning, match=r"cannot be removed .*Permission denied: .*/step-1'"
        ):
            save(3)
        for step in (4, 5):
            save(step)
        assert ckpt.steps() == [1, 4, 5]
    save(6)
    assert ckpt.steps() == [5, 6]
    assert {save.status for save in ckpt.saves} == {"committed"}


@pytest.fixture
def many(runs: Path) -> Path:
    """The directory of twenty checkpoints."""
    with Checkpointer(runs / "a", writer="buffered") as ckpt:
        for step in range(20):
            ckpt.save({"step": step}, step)
    return runs / "a"


def test_many_old_checkpoints(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save removes all that it should; each rename is synced before files are removed."""
    done: list[str] = []
    remove_tree = shutil.rmtree
    monkeypatch.setattr("iobench.checkpoint.store.sync_directory", lambda _: done.append("sync"))
    monkeypatch.setattr(
        "iobench.writers.removal.remove_tree", lambda at: (done.append("remove"), remove_tree(at))
    )
    with Checkpointer(many, writer="buffered", keep=KeepLast(2)) as ckpt:
        ckpt.save({"step": 20}, 20)
        saved = ["sync", "sync"]  # the new checkpoint and its name
        assert _names(many) == {"step-19", "step-20"}
        assert done == [*saved, *["sync", "remove"] * 19]


def _refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Nothing whose name has one of these parts can be removed; `name` is the first of them."""
    refused, remove_tree = [name], shutil.rmtree

    def refuse(path: Path) -> None:
        if any(part in path.name for part in refused):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        remove_tree(path)

    monkeypatch.setattr("iobench.writers.removal.remove_tree", refuse)
    return refused


def test_old_files_that_cannot_be_removed(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning, once; the others are removed, and the next Checkpointer tries it again."""
    refused = _refuse(monkeypatch, ".step-12.")
    with Checkpointer(many, writer="buffered", keep=KeepLast(2)) as ckpt:
        with pytest.warns(RuntimeWarning, match=r"cannot be removed .*\.step-12\."):
            ckpt.save({"step": 20}, 20)
        ckpt.save({"step": 21}, 21)
        assert (ckpt.steps(), len(_names(many))) == ([20, 21], 3)
    refused.clear()
    Checkpointer(many, writer="buffered").close()
    assert _names(many) == {"step-20", "step-21"}


def test_an_interrupt_while_old_files_are_removed(many: Path, monkeypatch) -> None:
    """The save is committed, and the next one removes the rest."""
    remove_tree, calls = shutil.rmtree, iter((None, KeyboardInterrupt, *[None] * 20))

    def interrupted(path: Path) -> None:
        if error := next(calls):
            raise error
        remove_tree(path)

    monkeypatch.setattr("iobench.writers.removal.remove_tree", interrupted)
    with Checkpointer(many, writer="buffered", keep=KeepLast(2)) as ckpt:
        with pytest.raises(KeyboardInterrupt):
            ckpt.save({"step": 20}, 20)
        assert ckpt.latest() == 20
        ckpt.save({"step": 21}, 21)
        assert ckpt.steps() == [20, 21]
    Checkpointer(many, writer="buffered").close()
    assert _names(many) == {"step-20", "step-21"}


def test_leftovers_that_cannot_be_removed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Checkpointer can still use its directory, and removes the others."""
    left = [runs / f".step-{step}.abcd{STAGING_SUFFIX}" for step in (1, 2, 3)]
    for path in left:
        path.mkdir()
    _refuse(monkeypatch, left[1].name)
    with pytest.warns(RuntimeWarning, match=r"Permission denied: .*/\.step-2\.abcd"):
        Checkpointer(runs, writer="buffered").close()
    assert _names(runs) == {left[1].name}


def test_a_step_that_is_a_link(ckpt: Checkpointer, runs: Path) -> None:
    """It can be loaded. When it is removed or replaced, only the link is removed."""
    at = runs / "a"
    for step in (1, 2):
        ckpt.save({"step": step}, step)
    moved = [_move_away(at / f"step-{step}", runs) for step in (1, 2)]
    assert [load_checkpoint(at, step)["step"] for step in (1, 2)] == [1, 2]
    ckpt.load(1)
    ckpt.save({"step": 20}, 2)  # in place of the second
    ckpt.save({"step": 30}, 3)  # the first is not kept any more
    assert _names(at) == {"step-2", "step-3"}
    assert all((path / "manifest.json").is_file() for path in moved)
    ckpt.close()
    (at / f".step-1.abcd{STAGING_SUFFIX}").symlink_to(moved[0])  # as 0.1.0 left it
    (at / f".step-2.abcd{STAGING_SUFFIX}").symlink_to(runs / "gone")
    with Checkpointer(at, writer="buffered") as again:
        assert again.load()["step"] == 30
    assert _names(at) == {"step-2", "step-3"}
    assert all((path / "manifest.json").is_file() for path in moved)


def test_a_step_that_is_a_link_to_nothing(ckpt: Checkpointer, runs: Path, gated) -> None:
    """Its disk is not mounted: the step does not exist, and is refused before a write."""
    ckpt.save({"step": 1}, 1)
    moved = _move_away(runs / "a" / "step-1", runs)
    moved.rename(runs / "unmounted")
    ckpt.close()
    gated.let()
    with Checkpointer(runs / "a", writer=gated) as again:
        assert again.latest() is None
        with pytest.raises(TargetError, match="step-1 exists"):
            again.save({"step": 1}, 1)
    assert not gated.begun.acquire(blocking=False)
    assert _names(runs / "a") == {"step-1"}


def test_links_that_cannot_be_followed(ckpt: Checkpointer, monkeypatch) -> None:
    """A step on a failing disk raises that error, with its errno."""
    ckpt.save({"step": 1}, 1)

    def fail(path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "is_file", fail)
    with pytest.raises(TransferError, match="listing") as caught:
        ckpt.steps()
    assert caught.value.errno == errno.ESTALE


def test_relative_to_where_it_was_made(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative location is relative to the working directory at the construction."""
    elsewhere = runs / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(runs)
    with Checkpointer("a", writer="buffered") as ckpt:
        monkeypatch.chdir(elsewhere)
        ckpt.save({"step": 1}, 1)
        ckpt.save_async({"step": 2}, 2)
        ckpt.wait()
        assert ckpt.load() == {"step": 2}
    assert _names(runs / "a") == {"step-1", "step-2"}
    assert not _names(elsewhere)


@pytest.mark.parametrize("remade", [False, True])
def test_another_directory_at_its_name(runs: Path, remade: bool) -> None:
    """Removed, and perhaps made again by others: no step is saved or removed there."""
    at = runs / "a"
    first = Checkpointer(at, writer="buffered", keep=KeepLast(1))
    first.save({"step": 1}, 1)
    shutil.rmtree(at)
    second = Checkpointer(at, writer="buffered") if remade else None
    if second:
        second.save({"by": "the second"}, 1)
    for act in (
        lambda: first.save({"step": 2}, 2),
        lambda: first.remove(1),
        lambda: (first.save_async({"step": 2}, 2), first.wait()),
    ):
        with pytest.raises(TargetError, match="was removed or replaced since"):
            act()
    first.close()
    assert at.exists() is remade
    if second:
        assert _names(at) == {"step-1"}
        second.save({"by": "the second"}, 2)
        second.close()


def test_removed_while_it_is_written(runs: Path, gated) -> None:
    """A writer makes missing directories again; its files are not a checkpoint."""
    at = runs / "a"
    ckpt = Checkpointer(at, writer=gated)
    save = ckpt.save_async({"step": 1}, 1)
    gated.begun.acquire()
    shutil.rmtree(at)
    gated.let()
    with pytest.raises(TargetError, match="was removed or replaced since"):
        ckpt.close()
    assert save.status == "failed"
    assert not _names(at)
