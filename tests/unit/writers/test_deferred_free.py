"""Large files that are replaced or removed: which ones are held open, and for how long."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.forked import in_child

from iobench.testing.check import Footprint
from iobench.units import MIB
from iobench.writers.image import FileImage
from iobench.writers.local import deferred_free
from iobench.writers.local.new_file import NewFile
from iobench.writers.registry import make
from iobench.writers.removal import remove_tree
from iobench.writers.transfer import Meter

from ...conftest import MakeFilesystem

_LARGE = 64 * MIB


@pytest.fixture(scope="module")
def ext4(shared_filesystems: MakeFilesystem) -> Path:
    return shared_filesystems("ext4")


def _make(path: Path, size_bytes: int = _LARGE) -> Path:
    """Make a file with that many bytes of blocks."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    return path


def _mapped_here(path: Path) -> int:
    """Return how many mappings of this process are of the file, under any name."""
    found = path.stat()
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    maps = Path("/proc/self/maps").read_text()
    return sum(line.split()[3:5] == [device, str(found.st_ino)] for line in maps.splitlines())


def _free_bytes(directory: Path) -> int:
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with Footprint.unchanged():
        yield


def test_held_while_it_loses_its_name(ext4: Path) -> None:
    before = _free_bytes(ext4)
    file = _make(ext4 / "file")
    with deferred_free.freed_later([file]):
        assert _mapped_here(file) == 1
        file.unlink()
    deferred_free.wait()
    assert _free_bytes(ext4) == before


def test_files_that_are_not_held(
    ext4: Path, tmp_path: Path, shared_filesystems: MakeFilesystem
) -> None:
    small = _make(ext4 / "small", _LARGE - 1)
    linked = _make(ext4 / "linked")
    os.link(linked, ext4 / "again")
    symlink = ext4 / "symlink"
    symlink.symlink_to(linked)
    elsewhere = _make(shared_filesystems("tmpfs") / "file")
    for path in (small, linked, symlink, elsewhere):
        with deferred_free.freed_later([path]):
            assert _mapped_here(path) == 0, path
    with deferred_free.freed_later([tmp_path / "nothing there"]):
        pass
    for path in (small, linked, symlink, ext4 / "again"):
        path.unlink()


def test_a_failure_inside_goes_on_and_the_file_stays(ext4: Path) -> None:
    file = _make(ext4 / "file")
    with pytest.raises(ZeroDivisionError), deferred_free.freed_later([file]):
        _ = 1 / 0
    assert file.exists()
    file.unlink()


def test_a_publish_holds_what_it_replaces(ext4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _make(ext4 / "file")
    held = []
    replace = os.replace

    def watched(one: str, other: str) -> None:
        held.append(_mapped_here(old))
        replace(one, other)

    monkeypatch.setattr(os, "replace", watched)
    with NewFile(old, Meter()) as new:
        os.write(new.fd, b"new")
        new.publish(sync_names=True)
    assert held == [1]
    assert old.read_bytes() == b"new"
    old.unlink()


@pytest.mark.slow
def test_a_save_that_replaces_another_finds_space(
    new_filesystem: MakeFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space that is not freed yet never makes a save fail, even if freeing is slow."""
    unmap = deferred_free.linux.unmap_memory

    def slow(address: int, length: int) -> None:
        time.sleep(0.3)
        unmap(address, length)

    monkeypatch.setattr(deferred_free.linux, "unmap_memory", slow)
    disk = new_filesystem("ext4")
    for share in (0.6, 0.4, 0.3):  # of the free space when a save begins; at 0.6 only one file fits
        size_bytes = int(_free_bytes(disk) * share / (1 + share)) & ~4095
        image = FileImage.of("file", [np.ones(size_bytes, dtype=np.uint8)])
        for _ in range(6):
            make("odirect").write(image, disk)
        assert (disk / "file").stat().st_size == size_bytes
        (disk / "file").unlink()
        deferred_free.wait()


def test_held_files_leave_enough_free_space(new_filesystem: MakeFilesystem) -> None:
    disk = new_filesystem("ext4")
    files = [_make(disk / str(n)) for n in range(3)]
    with deferred_free.freed_later([files[0]]):
        kept = _free_bytes(disk) - 3 * _LARGE  # room for twice one of them, not for twice two
        filler = _make(disk / "filler", kept)
        with deferred_free.freed_later([files[1]]):
            assert [_mapped_here(file) for file in files] == [1, 0, 0]
        filler.unlink()
        with deferred_free.freed_later([files[2]]):
            assert [_mapped_here(file) for file in files] == [1, 0, 1]


@pytest.mark.parametrize("due", [False, True])
def test_a_forked_child_holds_nothing(
    ext4: Path, monkeypatch: pytest.MonkeyPatch, due: bool
) -> None:
    """Also one that is forked while the space is freed; and it unmaps nothing of its own."""
    file = _make(ext4 / "file")
    unmap = deferred_free.linux.unmap_memory

    def forking(address: int, length: int) -> None:
        monkeypatch.undo()
        in_child(lambda: _hold(file))
        unmap(address, length)

    with deferred_free.freed_later([file]):
        if due:
            monkeypatch.setattr(deferred_free.linux, "unmap_memory", forking)
            monkeypatch.setattr(threading.Thread, "start", _refuse)
        else:
            in_child(lambda: _hold(file))
        assert _mapped_here(file) == 1
    deferred_free.wait()
    assert _mapped_here(file) == 0
    file.unlink()


def _hold(file: Path) -> None:
    assert _mapped_here(file) == 0
    deferred_free.wait()  # usable there
    with deferred_free.freed_later([file]):
        assert _mapped_here(file) == 1


def _refuse(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
def test_without_a_thread_space_is_freed_at_once(
    ext4: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Also if the start is interrupted; no call waits for a thread that never began."""

    def refuse(self: threading.Thread) -> None:
        raise error("can't start new thread")

    file = _make(ext4 / "file")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        expected = contextlib.nullcontext() if error is RuntimeError else pytest.raises(error)
        with expected, deferred_free.freed_later([file]):
            pass
    assert _mapped_here(file) == 0
    deferred_free.wait()
    file.unlink()


def test_an_interpreter_that_ends_leaves_no_space_behind(ext4: Path) -> None:
    before = _free_bytes(ext4)
    file = _make(ext4 / "file")
    code = (
        "import os, sys\n"
        "from iobench.writers.local.deferred_free import freed_later\n"
        "with freed_later([sys.argv[1]]):\n"
        "    os.unlink(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", code, file], check=True, timeout=60)
    assert _free_bytes(ext4) == before


def test_remove_tree(ext4: Path) -> None:
    before = _free_bytes(ext4)
    root = ext4 / "tree"
    (root / "below").mkdir(parents=True)
    for path in (root / "one", root / "below" / "two"):
        _make(path)
    (root / "small").write_text("x")
    outside = _make(ext4 / "outside", 4096)
    (root / "link").symlink_to(outside)
    (root / "directory link").symlink_to(ext4)
    remove_tree(root)
    assert not root.exists()
    assert outside.exists()
    outside.unlink()
    deferred_free.wait()
    assert _free_bytes(ext4) == before


def test_remove_tree_follows_no_link(tmp_path: Path) -> None:
    """At the top only the link is removed; links below, also broken ones, are not followed."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("old")
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    for link in (tmp_path / "link", tree / "link", tree / "below" / "link"):
        link.symlink_to(victim)
    (tmp_path / "nowhere").symlink_to(tmp_path / "nothing")
    for name in ("link", "nowhere", "tree"):
        remove_tree(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == [victim, victim / "file"]


def test_remove_tree_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        remove_tree(tmp_path / "nothing")


def test_two_remove_the_same_directory(tmp_path: Path) -> None:
    """What another process removes at the same time is not an error."""
    for _ in range(5):
        directory = tmp_path / "step"
        directory.mkdir()
        for number in range(200):
            (directory / f"{number}").touch()
        errors: list[OSError] = []
        all_begin = threading.Barrier(3)

        def remove(
            directory: Path = directory,
            errors: list[OSError] = errors,
            all_begin: threading.Barrier = all_begin,
        ) -> None:
            all_begin.wait()
            try:
                remove_tree(directory)
            except OSError as error:
                if error.filename != str(directory):  # it began when all was removed
                    errors.append(error)

        threads = [threading.Thread(target=remove) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert not directory.exists()
