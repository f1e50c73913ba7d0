"""NewFile: has a temporary name until it is whole, and the metadata of what it replaces."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from iobench import linux
from iobench.errors import TargetError, TransferError
from iobench.testing import Footprint
from iobench.writers import registry
from iobench.writers.image import FileImage
from iobench.writers.local import new_file
from iobench.writers.local.new_file import (
    NewFile,
    copy_metadata,
    copy_owner,
    write_text,
)
from iobench.writers.transfer import Meter


def _new(path: Path, data: bytes = b"new", meter: Meter | None = None) -> NewFile:
    file = NewFile(path, meter or Meter())
    os.pwrite(file.fd, data, 0)
    return file


def _names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def _synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories that are synced, in order."""
    synced: list[str] = []
    real = new_file.sync_directory

    def spy(path: str) -> None:
        synced.append(os.path.realpath(path))
        real(path)

    monkeypatch.setattr(new_file, "sync_directory", spy)
    return synced


def test_every_directory_that_gained_a_name_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made directories become durable with the file; without sync_names nothing is synced."""
    synced = _synced(monkeypatch)
    _new(tmp_path / "a" / "b" / "file").publish(sync_names=True)
    assert set(synced) == {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")}
    del synced[:]
    _new(tmp_path / "a" / "b" / "file").publish(sync_names=True)
    assert synced == [str(tmp_path / "a" / "b")]
    del synced[:]
    _new(tmp_path / "c" / "file").publish(sync_names=False)
    assert synced == []


def test_directories_made_for_another_file_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is durable only when its parent directories are, no matter what made them, and by what
    spelling of their names."""
    synced = _synced(monkeypatch)
    first = NewFile(f"/{tmp_path}//a//b//first", Meter())
    _new(tmp_path / "a" / "b" / "second").publish(sync_names=True)
    assert set(synced) == {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")}
    del synced[:]
    first.publish(sync_names=True)
    assert synced == [str(tmp_path / "a" / "b")]


def test_a_directory_that_could_not_be_synced_is_synced_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name counts as durable only once a sync has succeeded; a name that was made is kept."""

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as broken, _new(tmp_path / "a" / "file") as file:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(TransferError, match="publishing"):
            file.publish(sync_names=True)
    synced = _synced(monkeypatch)
    _new(tmp_path / "a" / "file").publish(sync_names=True)
    assert synced == [str(tmp_path / "a"), str(tmp_path)]


@pytest.mark.parametrize("through_link", [False, True])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_only_a_regular_file_is_replaced(
    make: Callable[[Path], None], through_link: bool, tmp_path: Path
) -> None:
    """A directory, pipe or device of that name is refused before anything is made."""
    make(tmp_path / "file")
    before = (tmp_path / "file").stat()
    (tmp_path / "link").symlink_to("file")
    with Footprint.unchanged(), pytest.raises(TargetError, match=r"file: is a (directory|pipe)"):
        NewFile(tmp_path / ("link" if through_link else "file"), Meter())
    assert (tmp_path / "file").stat() == before
    assert _names(tmp_path) == ["file", "link"]


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666, 0o400, 0o755, 0o060])
def test_permissions_are_copied(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any umask; the new file never has wider permissions than the old one."""
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file").chmod(mode)
    meter, copied, created = Meter(), new_file.copy_metadata, []

    def copy(fd: int, *rest: Any) -> int:
        created.append(stat.S_IMODE(os.fstat(fd).st_mode))
        return copied(fd, *rest)

    monkeypatch.setattr(new_file, "copy_metadata", copy)
    before = os.umask(0)
    try:
        file = NewFile(tmp_path / "file", meter)
    finally:
        os.umask(before)
    with file:
        assert [one & ~mode for one in created] == [0]
        assert stat.S_IMODE(os.fstat(file.fd).st_mode) == mode | 0o600
        file.publish(sync_names=False)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    assert not meter.fallbacks


def _attributes(path: Path) -> dict[str, bytes]:
    kept = ("user.", "system.")
    return {n: os.getxattr(path, n) for n in os.listxattr(path) if n.startswith(kept)}


@pytest.mark.parametrize("mode", [0o640, 0o460])
def test_attributes_are_copied(mode: int, tmp_path: Path) -> None:
    """User attributes and an access control list; the permissions stay those of its mask."""
    old = tmp_path / "file"
    old.write_bytes(b"old")
    old.chmod(mode)
    entries = [(1, mode >> 6, -1), (2, 4, 1234), (4, 0, -1), (16, mode >> 3 & 7, -1), (32, 0, -1)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *one) for one in entries)
    try:
        os.setxattr(old, "user.run", b"7")
        os.setxattr(old, "system.posix_acl_access", acl)
    except OSError as error:
        pytest.skip(f"no attributes here: {error}")
    before, meter = _attributes(old), Meter()
    with NewFile(old, meter) as file:
        assert stat.S_IMODE(os.fstat(file.fd).st_mode) == mode | 0o600
        file.publish(sync_names=False)
    assert len(before) == 2
    assert _attributes(old) == before
    assert stat.S_IMODE(old.stat().st_mode) == mode
    assert not meter.fallbacks


@pytest.mark.parametrize(
    ("call", "number", "fallback"),
    [
        ("fchmod", errno.EPERM, "permissions 755"),
        ("fchmod", errno.EOPNOTSUPP, "permissions 755"),
        ("fchmod", errno.EIO, None),
        ("getxattr", errno.EOPNOTSUPP, "attribute user.run"),
        ("getxattr", errno.EACCES, "attribute user.run"),
        ("getxattr", errno.EIO, None),
        ("listxattr", errno.ENOENT, ""),
        ("listxattr", errno.EOPNOTSUPP, ""),
        ("listxattr", errno.EIO, None),
    ],
)
def test_what_cannot_be_kept(
    call: str, number: int, fallback: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal still stores the file, and is recorded unless there was nothing to keep. Any other
    error is raised; no file or descriptor is left."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file").chmod(0o755)
    if call == "getxattr":
        monkeypatch.setattr(os, "listxattr", lambda _: ["security.selinux", "user.run"])
    monkeypatch.setattr(os, call, refuse)
    meter = Meter()
    with Footprint.unchanged():
        if fallback is None:
            with pytest.raises(OSError, match=os.strerror(number)):
                NewFile(tmp_path / "file", meter)
        else:
            with _new(tmp_path / "file", meter=meter) as file:
                file.publish(sync_names=False)
    assert _names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == (b"old" if fallback is None else b"new")
    expected = [(fallback, os.strerror(number))] if fallback else []
    assert [(one.wanted, one.reason) for one in meter.fallbacks] == expected


def test_a_file_where_a_directory_should_be(tmp_path: Path) -> None:
    """A path that leads through a file is refused, and the file stays."""
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        NewFile(tmp_path / "file" / "below", Meter())
    assert (tmp_path / "file").read_bytes() == b"x"


def test_a_failing_unlink_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It becomes a note of an earlier error; without one it is a warning."""

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "unlink", refuse)
    with Footprint.unchanged():
        with pytest.raises(KeyError) as caught, _new(tmp_path / "file"):
            raise KeyError
        assert "left behind" in caught.value.__notes__[0]
        file = _new(tmp_path / "file")
        with pytest.warns(ResourceWarning, match="Read-only file system"):
            file.abandon()


@pytest.mark.parametrize("reserved", [0, 5, 100_000])
@pytest.mark.parametrize("size", [0, 3, 5000])
def test_set_size_is_exact(tmp_path: Path, reserved: int, size: int) -> None:
    """With any reservation or padding, the file has exactly the requested size."""
    with _new(tmp_path / "file", bytes(4096)) as file:
        file.reserve(0, reserved)
        file.set_size(size)
        file.publish(sync_names=False)
    found = (tmp_path / "file").stat()
    assert found.st_size == size
    assert found.st_blocks * 512 <= 2 * 4096 + 4096


@pytest.mark.parametrize("heeds_after_sync", [True, False])
def test_a_size_that_is_not_set(
    tmp_path: Path, heeds_after_sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ftruncate that does nothing, like that of s3fs, is repeated, or is an error."""
    real, synced, meter = os.ftruncate, [], Meter()
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(
        os, "ftruncate", lambda fd, size: heeds_after_sync and synced and real(fd, size)
    )
    with NewFile(tmp_path / "file", meter) as file:
        os.write(file.fd, bytes(4096))
        if heeds_after_sync:
            file.set_size(1000)
            assert os.fstat(file.fd).st_size == 1000
        else:
            with pytest.raises(TransferError, match="has 4096 bytes after ftruncate to 1000"):
                file.set_size(1000)
    assert [fallback.wanted for fallback in meter.fallbacks] == ["ftruncate"]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_fallocate(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a recorded fallback, not a failure."""

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(linux, "fallocate", refuse)
    meter = Meter()
    with NewFile(tmp_path / "file", meter) as file:
        file.reserve(0, 100)
    (fallback,) = meter.fallbacks
    assert (fallback.wanted, fallback.used) == ("fallocate", "none")
    assert os.strerror(number) in fallback.reason


@pytest.mark.parametrize("plant", [os.symlink, os.link])
@pytest.mark.parametrize("how", ["writer", "text"])
def test_a_temporary_name_that_others_took(
    how: str,
    plant: Callable[[Path, Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that exists is never opened: it could be a link to a victim's file."""
    victim, there = tmp_path / "victim", tmp_path / "there"
    victim.write_bytes(b"old")
    there.mkdir()
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    name = ".file.guessed.iobench-part" if how == "writer" else ".file.guessed"
    plant(victim, there / name)
    with pytest.raises(FileExistsError):
        _new(there / "file") if how == "writer" else write_text(there / "file", "new")
    assert victim.read_bytes() == b"old"
    assert not (there / "file").exists()


def _as_other(path: Path) -> os.stat_result:
    """Return the stat result of `path` with another owner."""
    found = list(os.stat(path))
    found[4], found[5] = found[4] + 1, found[5] + 1
    return os.stat_result(found)


def test_a_link_that_the_kernel_does_not_follow(
    tmp_path: Path, sticky: Path, as_nobody: Callable[[Callable[[], None]], None]
) -> None:
    """Its destination is neither replaced nor made: the error is that of open(2)."""
    victim = sticky / "victim"
    (sticky / "locked").mkdir(mode=0o700)
    (sticky / "link").symlink_to("locked/../victim")
    (sticky / "loop").symlink_to("loop")
    image = FileImage.of("link", [b"new"])
    writers = [registry.make(name) for name in ("buffered", "odirect", "hybrid", "aiofiles")]

    for writer in writers:  # for their modules
        writer.write(image, tmp_path)

    def write() -> None:
        victim.write_bytes(b"old")
        victim.chmod(0o600)
        denied, looped = os.strerror(errno.EACCES), os.strerror(errno.ELOOP)
        for name, words in (("link", denied), ("locked/../link", denied), ("loop", looped)):
            with pytest.raises(OSError, match=words):
                (sticky / name).open("r+b")
            with pytest.raises(OSError, match=words):
                NewFile(sticky / name, Meter())
        for writer in writers:
            with pytest.raises(TransferError, match=denied):
                writer.open(sticky / "link")
            with pytest.raises(TransferError, match=denied):
                writer.write(image, sticky)

    as_nobody(write)
    assert (victim.read_bytes(), victim.stat().st_mode & 0o777) == (b"old", 0o600)
    assert sorted(os.listdir(sticky)) == ["link", "locked", "loop", "victim"]


def test_an_owner_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the group is copied, where permitted, and the owner is a recorded fallback."""
    asked: list[tuple[int, int]] = []

    def chown(_: int, owner: int, group: int) -> None:
        asked.append((owner, group))
        if owner >= 0:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chown", chown)
    (tmp_path / "file").write_bytes(b"old")
    old, meter = _as_other(tmp_path / "file"), Meter()
    with (tmp_path / "file").open("rb") as new:
        copy_metadata(new.fileno(), tmp_path / "file", old, meter)
    assert asked == [(old.st_uid, old.st_gid), (-1, old.st_gid)]
    (fallback,) = meter.fallbacks
    assert fallback.wanted == f"owner {old.st_uid}"
    assert fallback.reason == "Operation not permitted"


def test_other_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is not a refusal is raised."""

    def chown(*_: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "chown", chown)
    with pytest.raises(OSError, match="I/O error"):
        copy_owner(tmp_path, tmp_path.stat())
