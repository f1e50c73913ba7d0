"""Reads and writes of whole vectors and blocks, even if the kernel moves less per call."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iobench.errors import DataMismatchError
from iobench.testing import content
from iobench.writers.local.direct_file import pread_direct, pwrite_direct
from iobench.writers.local.posix import pread_all, pwrite_all

_SAME_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def _views(pieces: list[bytes]) -> list[np.ndarray]:
    return [np.frombuffer(bytearray(piece), dtype=np.uint8) for piece in pieces if piece]


@_SAME_FILE
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=20), max_size=10),
    limits=st.lists(st.integers(1, 30), max_size=8),
    offset=st.integers(0, 50),
)
def test_short_writes_are_continued(
    fd: int, short_calls, pieces: list[bytes], limits: list[int], offset: int
) -> None:
    """All bytes are written at their offsets, even if each call writes little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", _limited(os.pwritev, list(limits)))
        os.ftruncate(fd, 0)
        pwrite_all(fd, _views(pieces), offset)
    whole = b"".join(pieces)
    assert os.pread(fd, 1000, 0) == (bytes(offset) + whole if whole else b"")


@_SAME_FILE
@given(
    lengths=st.lists(st.integers(1, 20), max_size=10),
    limits=st.lists(st.integers(1, 30), max_size=8),
    offset=st.integers(0, 50),
)
def test_short_reads_are_continued(
    fd: int, lengths: list[int], limits: list[int], offset: int
) -> None:
    """All views are filled from their offsets, even if each call reads little."""
    data = np.random.default_rng(0).bytes(300)
    os.pwrite(fd, data, 0)
    views = [np.zeros(length, dtype=np.uint8) for length in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", _limited(os.preadv, list(limits)))
        pread_all(fd, views, offset)
    found = b"".join(view.tobytes() for view in views)
    assert found == data[offset : offset + len(found)]


def _limited(real, limits: list[int]):
    def call(number: int, views, offset: int, flags: int = 0) -> int:
        room = limits.pop(0) if limits else 1 << 30
        cut = []
        for view in views:
            cut.append(view[:room])
            room -= len(cut[-1])
        return real(number, cut, offset, flags)

    return call


def test_a_write_of_nothing_is_an_error(fd: int, short_calls) -> None:
    """A write that moves no byte raises OSError instead of trying forever."""
    left = short_calls("pwritev", [3, 0])
    with pytest.raises(OSError, match="a write at 13 took 0 bytes"):
        pwrite_all(fd, _views([b"abcdef"]), 10)
    assert left == []


def test_a_file_that_ends_before(fd: int) -> None:
    """A file that ends while it is read does not hold what was saved: DataMismatchError."""
    os.pwrite(fd, b"abc", 0)
    with pytest.raises(DataMismatchError, match="ended at 3"):
        pread_all(fd, [np.zeros(4, dtype=np.uint8)], 0)


_ALIGNMENT = 512


class _Kernel:
    """pwrite and preadv that move at most the given counts and check the alignment."""

    def __init__(self, limits: list[int]) -> None:
        self.limits = limits
        self.write, self.read = os.pwrite, os.preadv

    def _room(self, length: int, offset: int) -> int:
        assert length % _ALIGNMENT == offset % _ALIGNMENT == 0, "the kernel would say EINVAL"
        return self.limits.pop(0) if self.limits else length

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return self.write(fd, bytes(data[: self._room(len(data), offset)]), offset)

    def preadv(self, fd: int, views: list[memoryview], offset: int) -> int:
        (view,) = views
        return self.read(fd, [view[: self._room(len(view), offset)]], offset)


_LIMITS = st.lists(st.integers(_ALIGNMENT, 5 * _ALIGNMENT), max_size=6)


@_SAME_FILE
@given(blocks=st.integers(1, 8), limits=_LIMITS, offset=st.integers(0, 4))
def test_short_direct_writes_are_continued(
    fd: int, blocks: int, limits: list[int], offset: int
) -> None:
    """Short writes, at and off alignment, are continued from the last aligned byte."""
    data = content(blocks * _ALIGNMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", _Kernel(list(limits)).pwrite)
        calls = pwrite_direct(fd, data, offset * _ALIGNMENT, _ALIGNMENT)
    assert os.pread(fd, len(data), offset * _ALIGNMENT) == data.tobytes()
    assert 1 <= calls <= len(limits) + 1


@_SAME_FILE
@given(wanted=st.integers(1, 8 * _ALIGNMENT), limits=_LIMITS, offset=st.integers(0, 4))
def test_short_direct_reads_are_continued(
    fd: int, wanted: int, limits: list[int], offset: int
) -> None:
    """Short reads, at and off alignment, are continued; the file may end within the last block."""
    offset *= _ALIGNMENT
    data = content(offset + wanted)
    os.ftruncate(fd, 0)
    os.pwrite(fd, data.tobytes(), 0)
    block = np.zeros(-(-wanted // _ALIGNMENT) * _ALIGNMENT, dtype=np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", _Kernel(list(limits)).preadv)
        pread_direct(fd, block, offset, wanted, _ALIGNMENT)
    assert block[:wanted].tobytes() == data[offset:].tobytes()
