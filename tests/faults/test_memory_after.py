"""A failed save gives its memory back."""

import ctypes
import errno
import functools
import gc
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.scripted_s3 import answer, reset

from iobench import linux
from iobench.errors import DataMismatchError, TransferError, UnavailableError
from iobench.testing import BrokenImage, content, expect_raises
from iobench.units import MIB
from iobench.writers.base import Writer
from iobench.writers.image import FileImage

_SIZE = 4 * MIB
_DATA = content(_SIZE)
_OBJECT = content(2 * _SIZE)  # two parts


def _resident_bytes() -> int:
    """Return the memory in use, without garbage and without free memory of the C library."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@contextmanager
def _no_space(writer: Writer, disk: Path) -> Iterator[Path]:
    with (disk / "filler").open("wb") as filler:
        found = os.statvfs(disk)
        linux.fallocate(filler.fileno(), 0, found.f_bavail * found.f_frsize - _SIZE // 2)
    try:
        yield disk
    finally:
        (disk / "filler").unlink()


@contextmanager
def _size_limit(writer: Writer, disk: Path) -> Iterator[Path]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_SIZE // 2, hard))
    try:
        yield disk
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def _read_only(writer: Writer, disk: Path) -> Iterator[Path]:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


@contextmanager
def _no_directory(writer: Writer, disk: Path) -> Iterator[Path]:
    (disk / "file").write_bytes(b"")
    try:
        yield disk / "file"
    finally:
        (disk / "file").unlink()


@contextmanager
def _no_sync(writer: Writer, disk: Path) -> Iterator[Path]:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        yield disk


@pytest.mark.root
@pytest.mark.parametrize(
    "fault", [_no_space, _size_limit, _read_only, _no_directory, _no_sync], ids=lambda f: f.__name__
)
def test_memory(make, shared_filesystems, device, fault) -> None:
    """After many failed saves this process has no more memory than after the first few."""
    disk = _disk(shared_filesystems)
    writer = make(disk, block_size="512KiB")
    with fault(writer, disk) as directory:

        def fail() -> None:
            expect_raises(OSError, writer.write, FileImage.of("model", [_DATA]), directory)
            expect_raises(OSError, _stream, writer, directory / "model")
            device.own.run_to(len(device.own))  # as a real one does in time

        _expect_steady(fail, 6)
    writer.write(FileImage.of("model", [_DATA]), disk)
    (disk / "model").unlink()


@functools.cache
def _disk(shared_filesystems: Callable[..., Path]) -> Path:
    return shared_filesystems("ext4", 48 * MIB)


def _stream(writer: Writer, path: Path) -> None:
    with writer.open(path) as stream:
        stream.write(_DATA)


def test_memory_after_bad_bytes(make, tmp_path) -> None:
    """The same for a worker that fails, a stream that is aborted and a restore that does not
    fit."""
    writer = make(tmp_path, block_size="512KiB")
    (tmp_path / "short").write_bytes(_DATA[:-1])
    room = FileImage.of("short", [bytearray(_SIZE)])

    def fail() -> None:
        image = BrokenImage.at("model", _DATA, _SIZE - 1)
        expect_raises(TransferError, writer.write, image, tmp_path)
        stream = writer.open(tmp_path / "model")
        stream.write(_DATA)
        stream.abort()
        expect_raises(DataMismatchError, writer.read, room, tmp_path)

    _expect_steady(fail, 8)


def test_memory_of_objects(server, writer) -> None:
    """The same for uploads, streams and restores that fail at the store. The store keeps no memory
    either."""
    server.objects["run/old"] = _OBJECT.tobytes()
    room = FileImage.of("old", [bytearray(len(_OBJECT))])

    def fail() -> None:
        for operation, fault, error in (
            ("part", answer(403, "AccessDenied"), UnavailableError),
            ("complete", answer(403, "AccessDenied"), UnavailableError),
            ("part", answer(503, "SlowDown"), TransferError),
            ("complete", reset, TransferError),
        ):
            times = 1 if error is UnavailableError else 99
            server.fail(operation, fault, times=times, after=operation == "part")
            image = FileImage.of("model", [_OBJECT])
            expect_raises(error, writer.write, image, "s3://bucket/run")
            server.forget_faults()
        stream = writer.open("s3://bucket/run/model")
        stream.write(_OBJECT)
        stream.abort()
        for fault, error in (
            (answer(412, "PreconditionFailed"), DataMismatchError),
            (reset, TransferError),
        ):
            server.fail("get", fault, times=99, after=1)
            expect_raises(error, writer.read, room, "s3://bucket/run")
            server.forget_faults()

    _expect_steady(fail, 3, allowed_bytes=3 * _SIZE)  # the memory of the server for a request
    assert set(server.objects) == {"run/old"}
    assert not server.uploads


def _expect_steady(fail: Callable[[], None], times: int, *, allowed_bytes: int = _SIZE) -> None:
    """A leak grows with every failure. A pool fills up once, in some runs later than in others."""
    for _ in range(2):
        fail()
    grown = []
    for _ in range(3):
        before = _resident_bytes()
        for _ in range(times):
            fail()
        grown.append(_resident_bytes() - before)
        if grown[-1] < allowed_bytes:
            return
    pytest.fail(f"grew by {grown} bytes, each time by more than {allowed_bytes}")
