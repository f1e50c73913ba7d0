"""A directory has its name only when it is whole, whatever goes wrong on the way."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from iobench import linux
from iobench.errors import TransferError
from iobench.integrations import staged_directory
from iobench.integrations.staged_directory import StagedDirectory


def write(staged: StagedDirectory, text: str, *names: str) -> None:
    for name in names:
        path = staged.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def tree(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def publish(final: Path, text: str, *names: str, keep_others: bool = False) -> None:
    staged = StagedDirectory(final)
    staged.begin()
    write(staged, text, *names)
    staged.publish(keep_others=keep_others)


@pytest.mark.parametrize("exchange", [True, False])
def test_published_and_replaced(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is seen before, and nothing of the old one after; with and without renameat2."""
    if not exchange:

        def refuse(one: str, other: str) -> None:
            raise OSError(errno.EINVAL, "not supported")

        monkeypatch.setattr(linux, "exchange_names", refuse)
    final = tmp_path / "new" / "last"
    staged = StagedDirectory(final)
    staged.begin()
    write(staged, "1", "a", "below/b")
    assert not final.exists()
    staged.publish()
    assert tree(tmp_path) == {"new/last/a": "1", "new/last/below/b": "1"}
    publish(final, "2", "a", "c")
    assert tree(tmp_path) == {"new/last/a": "2", "new/last/c": "2"}


def test_others_are_kept(tmp_path: Path) -> None:
    """Entries that the new directory has none for: files, directories and links."""
    final = tmp_path / "last"
    publish(final, "1", "a", "logs/x")
    (final / "link").symlink_to("nowhere")
    publish(final, "2", "a", keep_others=True)
    assert tree(tmp_path) == {"last/a": "2", "last/logs/x": "1"}
    assert (final / "link").is_symlink()


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("failing", ["last", "run"])
def test_a_failure_leaves_what_was_there(
    failing: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the new directory cannot be synced, or at last the one that it is in."""
    final = tmp_path / "run" / "last"
    if there:
        publish(final, "1", "a")
    staged = StagedDirectory(final)
    staged.begin()
    write(staged, "2", "a")

    def fail(path: Path) -> None:
        if Path(path).name == failing:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(staged_directory, "sync_directory", fail)
    with pytest.raises(TransferError, match="publishing"):
        staged.publish()
    staged.discard()
    assert tree(tmp_path) == ({"run/last/a": "1"} if there else {})


def test_leftovers_are_cleared(tmp_path: Path) -> None:
    """What a killed process left half written does not get into the next one."""
    killed = StagedDirectory(tmp_path / "last")
    killed.begin()
    write(killed, "half", "a", "b")
    publish(tmp_path / "last", "1", "a")
    assert tree(tmp_path) == {"last/a": "1"}
