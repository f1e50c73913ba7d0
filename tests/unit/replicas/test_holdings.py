"""Segments of an agent: generations, limits of memory, and the pace of sending."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import numpy as np
import pytest

from iobench import linux
from iobench.errors import ReplicaError
from iobench.replicas.protocol import Version
from iobench.replicas.segment import (
    DIGEST,
    PIECE,
    Holdings,
    MemorySegment,
    NodeMemory,
    RankBytes,
    digest_of,
)
from iobench.units import GIB, MIB

_RANK = 0


@pytest.fixture
def holdings() -> Iterator[Holdings]:
    """Segments with a budget of 8 MiB; none has memory at the end."""
    made = Holdings(NodeMemory(8 * MIB, available=lambda: None))
    yield made
    made.free()
    assert made.memory.taken_bytes == 0


def _version(serial: int) -> Version:
    return Version(serial, serial * 10, "a")


def _put(
    holdings: Holdings, serial: int, rank: int = _RANK, *, whole: bool = True
) -> MemorySegment:
    version, piece = _version(serial), np.full(PIECE, serial, np.uint8)
    segment = holdings.begin(rank, version, 1)
    segment.declare(version, RankBytes(PIECE, digest_of(piece), b""))
    if whole:
        segment.add(version, 0, piece)
        assert segment.missing(version) == []
        assert segment.complete
    return segment


def _steps(holdings: Holdings) -> list[int]:
    return sorted(one["version"].step for one in holdings.inventory())


def test_a_version_that_comes_in_never_replaces_the_last_settled_one(holdings: Holdings) -> None:
    """The version before is dropped only when a third begins."""
    _put(holdings, 1)
    holdings.settle(_version(1), kept=True)
    _put(holdings, 2, whole=False)
    assert _steps(holdings) == [10]
    _put(holdings, 3, whole=False)  # the transfer of the second broke
    assert _steps(holdings) == [10]
    _put(holdings, 3)
    assert _steps(holdings) == [10, 30]
    holdings.settle(_version(3), kept=True)
    _put(holdings, 4, whole=False)
    assert _steps(holdings) == [30]


def test_a_version_that_a_rank_lacks_is_dropped(holdings: Holdings) -> None:
    """The ranks have agreed that it is not complete: the one before is kept for the next."""
    _put(holdings, 1)
    holdings.settle(_version(1), kept=True)
    _put(holdings, 2)
    holdings.settle(_version(2), kept=False)
    assert _steps(holdings) == [10]


def test_without_agreement_the_newest_complete_version_stays(holdings: Holdings) -> None:
    """A job that died before the ranks agreed still has both."""
    _put(holdings, 1)
    _put(holdings, 2)
    assert _steps(holdings) == [10, 20]
    _put(holdings, 3, whole=False)
    assert _steps(holdings) == [20]


def test_two_generations_use_two_memories(holdings: Holdings) -> None:
    """Many saves take no more memory than two."""
    for serial in range(1, 9):
        _put(holdings, serial)
        holdings.settle(_version(serial), kept=True)
    assert holdings.memory.taken_bytes == 2 * MIB


def test_newer_versions_than_the_loaded_one_are_dropped(holdings: Holdings) -> None:
    """Training continues from the first: the second is of an abandoned future."""
    _put(holdings, 1)
    _put(holdings, 2)
    holdings.resume(_version(1))
    assert _steps(holdings) == [10]
    assert holdings.inventory()[0]["confirmed"]
    holdings.resume(None)
    assert _steps(holdings) == []


def test_forget(holdings: Holdings) -> None:
    """A step is dropped, the other one stays."""
    _put(holdings, 1)
    _put(holdings, 2)
    holdings.forget(10)
    assert _steps(holdings) == [20]


def test_ranks_of_an_earlier_placement_are_freed_when_the_new_one_is_safe(
    holdings: Holdings,
) -> None:
    """A node that got other ranks keeps the old bytes until all ranks have a newer version."""
    _put(holdings, 1)
    holdings.settle(_version(1), kept=True)
    holdings.expect([5])
    _put(holdings, 2, rank=5)
    assert _steps(holdings) == [10, 20]
    holdings.settle(_version(2), kept=True)
    assert _steps(holdings) == [20]
    assert holdings.memory.taken_bytes == MIB


def test_a_writer_of_a_replaced_version_is_stopped(holdings: Holdings) -> None:
    """A slow sender cannot write into the memory of a newer version."""
    old = _put(holdings, 1, whole=False)
    _put(holdings, 2, whole=False)
    _put(holdings, 3, whole=False)
    with pytest.raises(ReplicaError, match="step 10 was replaced or dropped"):
        old.add(_version(1), 0, np.zeros(PIECE, np.uint8))
    with pytest.raises(ReplicaError, match="step 10 was replaced or dropped"):
        old.missing(_version(1))  # not "nothing is missing"


def test_damage_and_contradictions_are_refused(holdings: Holdings) -> None:
    """A piece with another digest, a second declaration, digests of another size."""
    segment = _put(holdings, 1, whole=False)
    segment.add(_version(1), 0, np.zeros(PIECE, np.uint8))
    assert segment.missing(_version(1)) == [0]
    assert not segment.complete
    with pytest.raises(ReplicaError, match="two different parts"):
        segment.declare(_version(1), RankBytes(1, bytes(DIGEST), b""))
    with pytest.raises(ReplicaError, match="do not fit 2 bytes of data"):
        segment.declare(_version(1), RankBytes(2, b"", b""))
    with pytest.raises(ReplicaError, match="step 10 of rank 0"):
        holdings.find(_RANK, _version(1))


def test_a_repeated_piece_is_allowed(holdings: Holdings) -> None:
    """A second sender of the same version, and a version that is not declared yet."""
    segment = _put(holdings, 1)
    segment.add(_version(1), 0, np.full(PIECE, 1, np.uint8))
    segment.declare(_version(1), RankBytes(PIECE, digest_of(np.full(PIECE, 1, np.uint8)), b""))
    assert segment.complete
    begun = holdings.begin(_RANK, _version(2), 1)
    with pytest.raises(ReplicaError, match="was not declared"):
        begun.missing(_version(2))


def test_memory_is_refused_before_it_is_taken() -> None:
    """The node keeps 1 GiB for others; the reason has all numbers."""
    memory = NodeMemory(available=lambda: GIB + 3 * MIB)
    holdings = Holdings(memory)
    _put(holdings, 1)
    with pytest.raises(ReplicaError, match=r"5\.00 MiB more .* 1\.00 GiB are available, 1\.00 GiB"):
        holdings.begin(_RANK, _version(2), 1).reserve(_version(2), 5 * MIB)
    assert memory.taken_bytes == MIB
    holdings.free()
    assert memory.taken_bytes == 0


def test_an_error_of_the_kernel_takes_nothing(
    holdings: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process took the memory between the look and the call."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(linux, "fallocate", full)
    with pytest.raises(ReplicaError, match="No space left"):
        holdings.begin(_RANK, _version(1), 1).reserve(_version(1), MIB)
    assert holdings.memory.taken_bytes == 0
