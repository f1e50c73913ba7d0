"""The metadata that a new file takes from the file that it replaces."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from iobench.errors import TransferError
from iobench.writers import registry
from iobench.writers.image import FileImage
from iobench.writers.local.new_file import (
    NewFile,
    check_replaceable,
    copy_metadata,
    copy_owner,
    existing_file,
)
from iobench.writers.transfer import Meter


def _as_other(path: Path) -> os.stat_result:
    """Return the stat result of `path` with another owner."""
    found = list(os.stat(path))
    found[4], found[5] = found[4] + 1, found[5] + 1
    return os.stat_result(found)


def test_a_name_that_is_free(tmp_path: Path) -> None:
    """No file exists there, and it may be created."""
    path, found = existing_file(tmp_path / "file")
    assert (path, found) == (str(tmp_path / "file"), None)
    check_replaceable(path, found)


def test_a_link_is_followed(tmp_path: Path) -> None:
    """The file behind the link counts; a broken link is a free name."""
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("later")
    path, found = existing_file(tmp_path / "link")
    assert path == str(tmp_path / "file")
    assert found == (tmp_path / "file").stat()
    assert existing_file(tmp_path / "dangling") == (str(tmp_path / "later"), None)


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
                NewFile(sticky / name, 0, Meter())
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


@pytest.mark.parametrize(
    ("number", "raised"), [(errno.EOPNOTSUPP, False), (errno.EACCES, False), (errno.EIO, True)]
)
def test_an_attribute_that_cannot_be_kept(
    number: int, raised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is a recorded fallback; an I/O error is raised."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "listxattr", lambda _: ["security.selinux", "user.run"])
    monkeypatch.setattr(os, "getxattr", refuse)
    (tmp_path / "file").write_bytes(b"old")
    meter = Meter()
    with (tmp_path / "file").open("rb") as new, suppress(OSError) if raised else nullcontext():
        copy_metadata(new.fileno(), tmp_path / "file", (tmp_path / "file").stat(), meter)
        assert not raised
    assert [fallback.wanted for fallback in meter.fallbacks] == ["attribute user.run"][raised:]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EOPNOTSUPP])
def test_attributes_that_cannot_be_read(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without attributes, or a file removed since, has none to copy."""

    def refuse(_: object) -> list[str]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "listxattr", refuse)
    (tmp_path / "file").write_bytes(b"old")
    meter = Meter()
    with (tmp_path / "file").open("rb") as new:
        copy_metadata(new.fileno(), tmp_path / "file", (tmp_path / "file").stat(), meter)
    assert not meter.fallbacks


def test_other_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is not a refusal is raised."""

    def chown(*_: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "chown", chown)
    with pytest.raises(OSError, match="I/O error"):
        copy_owner(tmp_path, tmp_path.stat())
