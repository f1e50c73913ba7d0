"""Checks: what a durable write leaves in a directory: synced files, names, owners, permissions."""

from __future__ import annotations

import os
import socket
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from iobench.bench.targets.instruments import Instruments
from iobench.environment import DeviceMonitor
from iobench.errors import TargetError, TransferError
from iobench.testing.check import check
from iobench.testing.content import content
from iobench.testing.harness import WriterHarness, expect, expect_raises
from iobench.writers.transfer import Fallback

_OTHER_USER, _OTHER_GROUP = 12345, 54321


def _stream(harness: WriterHarness, name: str, data: bytes) -> None:
    with harness.open(name) as stream:
        stream.write(data)


@check(needs_directory=True)
def durable_files_are_synced(harness: WriterHarness) -> None:
    """After a durable write, files are regular, no page is dirty, and the device was flushed.

    Where the kernel shows neither dirty pages nor flushes, a warning says that it is NOT PROVED.
    """
    directory = Path(harness.test_target.target)
    monitor = DeviceMonitor(directory)
    instruments = Instruments.probe(directory, monitor)
    size = 3 * harness.block_size + 5
    many = [harness.image(f"many/{number}", content(size, number)) for number in range(3)]
    harness._made.update(image.path for image in many)
    ways: dict[str, Callable[[], object]] = {
        "write": lambda: harness.write(harness.image("file", content(size))),
        "stream": lambda: _stream(harness, "stream", content(size, 1).tobytes()),
        "write_many": lambda: harness.writer.write_many(many, harness.test_target.target),
    }
    unflushed = []
    for name, way in ways.items():
        before = monitor.read()
        way()
        now = monitor.read()
        if instruments.flush_counts and before and now and now.flushes == before.flushes:
            unflushed.append(name)
    expect(not instruments.ignored_syncs, f"syncs are ignored here: {instruments.ignored_syncs}")
    if instruments.unseen and not instruments.flush_counts:
        warnings.warn(
            f"durability of {harness.writer.name!r} is NOT PROVED in {directory}: "
            f"{instruments.unseen}, and no flushes of a device can be counted",
            stacklevel=2,
        )
    names = ["file", "stream", *(image.path for image in many)]
    found = instruments.inspect(directory, [(name, size) for name in names])
    expect(not found.problems, f"not as written: {', '.join(found.problems)}")
    expect(
        not found.unsynced_bytes, f"{found.unsynced_bytes} bytes are dirty after a durable write"
    )
    expect(not unflushed, f"{', '.join(unflushed)} returned before the device was flushed")


@contextmanager
def _directories_synced(seen: list[tuple[int, list[str]]]) -> Iterator[None]:
    """Note each os.fsync of a directory: its inode, and the names in it at that moment."""
    fsync = os.fsync

    def noted(fd: Any) -> None:
        fsync(fd)
        found = os.fstat(fd)
        names = os.listdir(f"/proc/self/fd/{fd}") if stat.S_ISDIR(found.st_mode) else []
        seen.append((found.st_ino, names))

    os.fsync = noted
    try:
        yield
    finally:
        os.fsync = fsync


@check(needs_directory=True)
def new_names_are_synced(harness: WriterHarness) -> None:
    """A durable write syncs the directories that gained a name, after they gained it.

    The syncs are seen at `os.fsync`. A writer that never calls it passes: it may sync otherwise.
    """
    directory = Path(harness.test_target.target)
    ways: dict[str, Callable[[], object]] = {
        "write": lambda: harness.write(harness.image("write/file", content(5000))),
        "stream": lambda: _stream(harness, "stream/file", b"x"),
        "write_many": lambda: harness.writer.write_many(
            [harness.image("write_many/file", content(5000))], harness.test_target.target
        ),
    }
    harness._made.add("write_many/file")
    for name, way in ways.items():
        seen: list[tuple[int, list[str]]] = []
        with _directories_synced(seen):
            way()
        for parent, entry in ((directory / name, "file"), (directory, name)):
            inode = parent.stat().st_ino
            synced = any(number == inode and entry in names for number, names in seen)
            expect(synced or not seen, f"{name}: the name {entry} in {parent} was not synced")


@check(needs_directory=True)
def replaced_files_keep_owner_and_permissions(harness: WriterHarness) -> None:
    """The new file has the owner, group and permissions of the one that it replaces."""
    directory = Path(harness.test_target.target)
    path = directory / "file"
    for permissions in (0o640, 0o600):
        for how in ("write", "stream"):
            harness.put("file", b"before")
            path.chmod(permissions)
            if os.geteuid() == 0:
                os.chown(path, _OTHER_USER, _OTHER_GROUP)
            before = path.stat()  # not what was asked where the file system keeps none
            fallbacks: tuple[Fallback, ...] = ()
            if how == "write":
                fallbacks = harness.write(harness.image("file", content(5000))).fallbacks
            else:
                _stream(harness, "file", b"after")
            after = path.stat()
            owner, mode = (after.st_uid, after.st_gid), stat.S_IMODE(after.st_mode)
            refused = any(f.wanted.startswith(("owner", "permissions")) for f in fallbacks)
            expect(
                refused
                or (owner, mode) == ((before.st_uid, before.st_gid), stat.S_IMODE(before.st_mode)),
                f"{how}: owner {owner} and permissions {mode:03o} in place of "
                f"{before.st_uid, before.st_gid} and {stat.S_IMODE(before.st_mode):03o}",
            )
            path.unlink()


@check(needs_directory=True)
def a_name_that_is_a_pipe_or_device(harness: WriterHarness) -> None:
    """Where a pipe or device has the name already, writing raises TargetError and leaves it."""
    directory = Path(harness.test_target.target)
    for path, _ in _special_files(harness, directory):
        before = path.lstat()
        # A pipe without a reader would stop a writer that opens it.
        reader = os.open(path, os.O_RDWR | os.O_NONBLOCK) if path.is_fifo() else -1
        try:
            expect_raises(TargetError, harness.write, harness.image("special", content(10)))
            expect_raises(TargetError, _stream, harness, "special", b"x")
        finally:
            if reader >= 0:
                os.close(reader)
        after = path.lstat()
        expect((after.st_ino, after.st_mode) == (before.st_ino, before.st_mode), "was replaced")


@check(needs_directory=True)
def special_files_are_not_read(harness: WriterHarness) -> None:
    """Where a pipe, socket or device has the name, reading raises TransferError, without a wait."""
    directory = Path(harness.test_target.target)
    for _, kind in _special_files(harness, directory):
        for read in (
            lambda: harness.read(harness.image("special", content(10))),
            lambda: harness.writer.open_source(harness.test_target.locate("special")).close(),
        ):
            error = expect_raises(TransferError, read)
            expect(kind in str(error), f"the message does not say that it is {kind}: {error}")


def _special_files(harness: WriterHarness, directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield a pipe, a socket and a device of one name, each with what it is, as far as possible."""
    path = directory / "special"
    harness._made.add("special")
    with socket.socket(socket.AF_UNIX) as bound:
        kinds: list[tuple[str, Callable[[], object]]] = [
            ("a pipe", lambda: os.mkfifo(path)),
            ("a socket", lambda: _bind(bound, path)),
        ]
        if os.geteuid() == 0:
            zero = os.makedev(1, 5)
            kinds.append(("a device", lambda: os.mknod(path, stat.S_IFCHR | 0o600, zero)))
        for kind, make in kinds:
            try:
                make()
            except OSError:  # the file system has none, or the container forbids them
                continue
            yield path, kind
            path.unlink()
    harness._made.discard("special")


def _bind(bound: socket.socket, path: Path) -> None:
    """Make the socket `path`; its whole name may be too long for a socket's address."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        bound.bind(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
