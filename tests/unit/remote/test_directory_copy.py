"""DirectoryCopy: a copy to a directory in which others may write, and syncs that fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from iobench.errors import TargetError, TransferError
from iobench.remote.directory_copy import DRAINING_SUFFIX, DirectoryCopy
from iobench.remote.pace import DrainPace
from iobench.remote.source_file import SourceFile

_NAME, _CONTENT = "part/tensors.safetensors", os.urandom(100_000)


@pytest.fixture
def source(tmp_path: Path) -> SourceFile:
    file = tmp_path / "local" / _NAME
    file.parent.mkdir(parents=True)
    file.write_bytes(_CONTENT)
    return SourceFile(tmp_path / "local", _NAME, len(_CONTENT))


@pytest.fixture
def final(tmp_path: Path) -> Path:
    (tmp_path / "remote").mkdir()
    return tmp_path / "remote" / "step-2"


def _copy(final: Path) -> DirectoryCopy:
    return DirectoryCopy(final, serial=2, pace=DrainPace(None, lambda: False), lock=None)


def _hidden(final: Path) -> Path:
    return final.with_name(f".step-2.2{DRAINING_SUFFIX}")


def _file_link(hidden: Path, victim: Path) -> None:
    (hidden / _NAME).parent.mkdir(parents=True)
    (hidden / _NAME).symlink_to(victim / "file")


def _hard_link(hidden: Path, victim: Path) -> None:
    (hidden / _NAME).parent.mkdir(parents=True)
    (hidden / _NAME).hardlink_to(victim / "file")


def _pipe(hidden: Path, _: Path) -> None:
    (hidden / _NAME).parent.mkdir(parents=True)
    os.mkfifo(hidden / _NAME)


def _link_of_the_parent(hidden: Path, victim: Path) -> None:
    hidden.mkdir()
    (hidden / "part").symlink_to(victim)


def _link_of_the_directory(hidden: Path, victim: Path) -> None:
    hidden.symlink_to(victim)


def _file_in_place_of_the_directory(hidden: Path, _: Path) -> None:
    hidden.write_text("")


@pytest.mark.parametrize(
    "plant",
    [
        *(_file_link, _hard_link, _pipe),
        *(_link_of_the_parent, _link_of_the_directory, _file_in_place_of_the_directory),
    ],
)
def test_planted_names_are_refused(
    plant: Any, source: SourceFile, final: Path, tmp_path: Path
) -> None:
    """Step and serial number are known, so the hidden name is: nothing is written through it."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("precious\n")
    plant(_hidden(final), victim)
    with source, pytest.raises(TargetError, match="remove it"):
        _copy(final).send(source)
    assert (victim / "file").read_text() == "precious\n"
    assert [path.name for path in victim.iterdir()] == ["file"]


def test_no_manifest_is_written_through_a_link(final: Path, tmp_path: Path) -> None:
    """The directory is looked at again before the copy is published."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "manifest.json").write_text("precious\n")
    _hidden(final).symlink_to(victim)
    with pytest.raises(TargetError, match="remove it"):
        _copy(final).publish(b"{}")
    assert (victim / "manifest.json").read_text() == "precious\n"
    assert not final.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_a_directory_of_another_user_is_refused(source: SourceFile, final: Path) -> None:
    """Its owner could replace what was compared."""
    _hidden(final).mkdir()
    os.chown(_hidden(final), 12345, -1)
    with source, pytest.raises(TargetError, match="another user's"):
        _copy(final).send(source)
    assert [path.name for path in final.parent.iterdir()] == [_hidden(final).name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_a_server_that_maps_root_to_another_user(
    source: SourceFile, final: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this process makes has that owner too, so the directory is its own."""
    original = os.mkdir

    def mkdir(path: Any, *args: Any, dir_fd: int | None = None, **more: Any) -> None:
        original(path, *args, dir_fd=dir_fd, **more)
        os.chown(path, 65534, -1, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with source:
        assert _copy(final).send(source) == len(_CONTENT)
        assert _copy(final).send(source) == 0
    assert (_hidden(final) / _NAME).read_bytes() == _CONTENT


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_sync_that_fails_costs_the_file(
    call: str, source: SourceFile, final: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache has bytes that the disk has lost: the next attempt must not trust them."""
    monkeypatch.setattr("iobench.remote.directory_copy._SYNCED", 1)
    original, failed = getattr(os, call), []

    def fails(fd: int) -> None:
        if not failed and os.fstat(fd).st_size == len(_CONTENT):
            failed.append(fd)
            raise OSError(errno.EIO, "Input/output error")
        original(fd)

    monkeypatch.setattr(os, call, fails)
    with source:
        with pytest.raises(TransferError, match="Input/output error"):
            _copy(final).send(source)
        assert not (_hidden(final) / _NAME).exists()
        assert _copy(final).send(source) == len(_CONTENT)
    assert (_hidden(final) / _NAME).read_bytes() == _CONTENT


def test_what_was_sent_is_not_sent_again(source: SourceFile, final: Path) -> None:
    """An attempt goes on from where the one before it ended."""
    with source:
        assert _copy(final).send(source) == len(_CONTENT)
        with (_hidden(final) / _NAME).open("r+b") as file:
            file.write(b"damaged")
        assert _copy(final).send(source) == len(_CONTENT)  # one block
        assert _copy(final).send(source) == 0
        copy = _copy(final)
        copy.publish(b"{}")
    assert (final / _NAME).read_bytes() == _CONTENT
    assert (final / "manifest.json").read_bytes() == b"{}"
