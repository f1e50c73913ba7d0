"""DirectoryCopy: a copy to a directory in which others may write, and syncs that fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from iobench.checkpoint.rate_limit import RateLimit, StoppedError
from iobench.errors import TargetError, TransferError
from iobench.remote.remote_copy import DRAINING_SUFFIX, DirectoryCopy
from iobench.remote.source_file import BLOCK_BYTES, SourceFile
from iobench.writers.config import load_writer
from iobench.writers.file_writer import FileWriter

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


def _copy(final: Path, writer: str = "hybrid") -> DirectoryCopy:
    writes = load_writer(writer)
    assert isinstance(writes, FileWriter)
    return DirectoryCopy(final, writes, serial=2, limit=RateLimit(None), lock=None)


def _hidden(final: Path) -> Path:
    return final.with_name(f".step-2.2{DRAINING_SUFFIX}")


def _file(hidden: Path) -> Path:
    (hidden / _NAME).parent.mkdir(parents=True)
    return hidden / _NAME


def _link_of_the_parent(hidden: Path, victim: Path) -> None:
    hidden.mkdir()
    (hidden / "part").symlink_to(victim)


@pytest.mark.parametrize(
    "plant",
    [
        lambda hidden, victim: _file(hidden).symlink_to(victim / "file"),
        lambda hidden, victim: _file(hidden).hardlink_to(victim / "file"),
        lambda hidden, _: os.mkfifo(_file(hidden)),
        _link_of_the_parent,
        Path.symlink_to,
        lambda hidden, _: hidden.write_text(""),
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


def _fails_once(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """The first call of `os.NAME` for a file of the copy fails."""
    original, failed = getattr(os, name), []

    def fails(fd: int, *more: Any) -> Any:
        if not failed and os.fstat(fd).st_size == len(_CONTENT):
            failed.append(fd)
            raise OSError(number, os.strerror(number))
        return original(fd, *more)

    monkeypatch.setattr(os, name, fails)


@pytest.mark.parametrize(("call", "number"), [("fsync", errno.EIO), ("ftruncate", errno.ENOSPC)])
def test_an_error_costs_the_file(
    call: str, number: int, source: SourceFile, final: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache may have bytes that the disk has lost: no later attempt may trust them."""
    _fails_once(monkeypatch, call, number)
    with source:
        with pytest.raises(TransferError, match=os.strerror(number)):
            _copy(final).send(source)
        assert not (_hidden(final) / _NAME).exists()
        assert _copy(final).send(source) == len(_CONTENT)
    assert (_hidden(final) / _NAME).read_bytes() == _CONTENT


@pytest.mark.parametrize("writer", ["buffered", "uncached", "odirect", "uring", "hybrid"])
def test_what_was_sent_is_not_sent_again(writer: str, tmp_path: Path, final: Path) -> None:
    """An attempt goes on from where the one before it ended, through the same writer."""
    _skip_unavailable(writer, tmp_path)
    content = os.urandom(3 * BLOCK_BYTES + 12_345)
    (tmp_path / "large").write_bytes(content)
    with SourceFile(tmp_path, "large", len(content)) as source:
        assert _copy(final, writer).send(source) == len(content)
        with (_hidden(final) / "large").open("r+b") as file:
            for at in (BLOCK_BYTES + 5, 3 * BLOCK_BYTES):
                file.seek(at)
                file.write(b"damaged")
        assert _copy(final, writer).send(source) == BLOCK_BYTES + 12_345  # two blocks
        with (_hidden(final) / "large").open("r+b") as file:
            file.truncate(2 * BLOCK_BYTES + 1)
        assert _copy(final, writer).send(source) == BLOCK_BYTES + 12_345
        assert _copy(final, writer).send(source) == 0
    assert (_hidden(final) / "large").read_bytes() == content


def _skip_unavailable(writer: str, directory: Path) -> None:
    found = load_writer(writer).available(directory)
    if not found.ok:
        pytest.skip(found.reason)


def test_a_copy_that_is_stopped(source: SourceFile, final: Path) -> None:
    """It ends before the next block; what it has sent stays."""
    copy = _copy(final)
    copy._limit.stop.set()
    with source, pytest.raises(StoppedError):
        copy.send(source)
    assert (_hidden(final) / _NAME).exists()
