"""SyncRing: real fsyncs by a real ring."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from iobench.errors import UnavailableError
from iobench.testing import Footprint
from iobench.writers.local import fsync_ring
from iobench.writers.local.fsync_ring import SyncRing


@pytest.fixture
def ring() -> Iterator[SyncRing]:
    """A ring for 8 fsyncs; skips without io_uring."""
    try:
        with SyncRing(8, 2) as ring:
            yield ring
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[list[int]]:
    """20 open files."""
    opened = [os.open(tmp_path / str(n), os.O_CREAT | os.O_WRONLY) for n in range(20)]
    for fd in opened:
        os.write(fd, b"data")
    yield opened
    for fd in opened:
        os.close(fd)


def test_more_than_the_ring_holds(ring: SyncRing, fds: list[int]) -> None:
    """All are synced in several rounds that reuse the entries of the ring."""
    for _ in range(5):
        assert ring.sync(fds) == {}
    assert ring.sync([]) == {}
    assert ring.sync(fds[:3]) == {}


def test_each_failure_by_its_number(ring: SyncRing, fds: list[int]) -> None:
    """The result has the errno of each that failed; all others are synced."""
    reader, writer = os.pipe()
    given = list(fds)
    given[3], given[17], given[18] = reader, writer, 1 << 20
    failed = ring.sync(given)
    assert {number: error.errno for number, error in failed.items()} == {
        3: errno.EINVAL,
        17: errno.EINVAL,
        18: errno.EBADF,
    }
    assert ring.sync(fds) == {}
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("number", [errno.ECANCELED, errno.EAGAIN, errno.EINTR])
def test_a_cancelled_fsync_is_repeated(
    ring: SyncRing, fds: list[int], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A cancelled fsync has not failed: fsync(2) decides."""
    real, synced = os.fsync, []
    given = [*fds[:2], 1 << 20]
    monkeypatch.setattr(ring, "_round", lambda fds: dict.fromkeys(range(len(fds)), -number))
    monkeypatch.setattr(os, "fsync", lambda fd: (real(fd), synced.append(fd)))
    failed = ring.sync(given)
    assert synced == fds[:2]
    assert {number: error.errno for number, error in failed.items()} == {2: errno.EBADF}


@pytest.mark.parametrize(
    ("refuse", "says"),
    [
        ("_SYS_SETUP", "no io_uring"),
        ("_SYS_REGISTER", "cannot be set up for fsync"),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, refuse: str, says: str) -> None:
    """The error names the missing call, and nothing stays open."""
    monkeypatch.setattr(fsync_ring, refuse, 9999)
    with Footprint.unchanged(), pytest.raises(UnavailableError, match=says):
        SyncRing(8, 2)


def test_a_ring_that_fails(ring: SyncRing, fds: list[int]) -> None:
    """An error of the ring itself is raised, not swallowed."""
    ring.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        ring.sync(fds)


def test_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unavailable where the processor may reorder loads."""
    monkeypatch.setattr(fsync_ring.platform, "machine", lambda: "aarch64")
    with pytest.raises(UnavailableError, match="aarch64"):
        SyncRing(8, 2)
