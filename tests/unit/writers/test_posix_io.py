"""Reads and writes of whole vectors and blocks, even if the kernel moves less per call."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iobench.errors import DataMismatchError
from iobench.testing import content
from iobench.writers.local.posix import pread_all, pwrite_all

_SAME_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


class _Kernel:
    """pwritev and preadv that move at most the given counts and check the alignment."""

    def __init__(self, limits: list[int], unit: int) -> None:
        self._limits, self._unit = list(limits), unit
        self._write, self._read = os.pwritev, os.preadv

    def pwritev(self, fd: int, views: list[np.ndarray], offset: int, flags: int) -> int:
        return self._write(fd, [view.copy() for view in self._cut(views, offset)], offset, flags)

    def preadv(self, fd: int, views: list[np.ndarray], offset: int, flags: int) -> int:
        return self._read(fd, self._cut(views, offset), offset, flags)

    def _cut(self, views: list[np.ndarray], offset: int) -> list[np.ndarray]:
        aligned = sum(map(len, views)) % self._unit == offset % self._unit == 0
        assert aligned, "the kernel would say EINVAL"
        room, cut = self._limits.pop(0) if self._limits else 1 << 30, []
        for view in views:
            cut.append(view[:room])
            room -= len(cut[-1])
        return cut


_OFFSETS = st.integers(0, 50)
_UNITS = st.sampled_from([1, 512])
_LENGTHS = st.lists(st.integers(1, 20), max_size=10)
_LIMITS = st.lists(st.integers(1, 30), max_size=8)
"""Of units, with a rest."""


@_SAME_FILE
@given(lengths=_LENGTHS, limits=_LIMITS, rest=st.integers(0, 511), offset=_OFFSETS, unit=_UNITS)
def test_short_writes_are_continued(
    fd: int, lengths: list[int], limits: list[int], rest: int, offset: int, unit: int
) -> None:
    """All bytes are written at their offsets, even if each call writes little: from the last
    aligned byte on."""
    views = [content(length * unit, length) for length in lengths]
    counts = [limit * unit + rest % unit for limit in limits]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", _Kernel(counts, unit).pwritev)
        os.ftruncate(fd, 0)
        calls = pwrite_all(fd, views, offset * unit, unit=unit)
    whole = b"".join(map(bytes, views))
    assert os.pread(fd, 1 << 20, 0) == (bytes(offset * unit) + whole if whole else b"")
    assert calls <= len(limits) + 1


@_SAME_FILE
@given(
    lengths=_LENGTHS,
    limits=_LIMITS,
    rest=st.integers(0, 511),
    offset=_OFFSETS,
    unit=_UNITS,
    missing=st.integers(0, 511),
)
def test_short_reads_are_continued(
    fd: int, lengths: list[int], limits: list[int], rest: int, offset: int, unit: int, missing: int
) -> None:
    """All views are filled from their offsets, even if each call reads little; the file may end
    within the last unit."""
    views = [np.zeros(length * unit, dtype=np.uint8) for length in lengths]
    whole = sum(map(len, views))
    wanted = max(0, whole - missing % unit)
    data = content(offset * unit + wanted)
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)
    counts = [limit * unit + rest % unit for limit in limits]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", _Kernel(counts, unit).preadv)
        pread_all(fd, views, offset * unit, wanted=wanted, unit=unit)
    found = b"".join(map(bytes, views))
    assert found[:wanted] == data[offset * unit :].tobytes()


def test_a_write_of_nothing_is_an_error(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that moves no byte raises OSError instead of trying forever."""
    monkeypatch.setattr(os, "pwritev", _Kernel([3, 0], 1).pwritev)
    with pytest.raises(OSError, match="a write at 13 took 0 bytes"):
        pwrite_all(fd, [content(6)], 10)


def test_empty_views_are_nothing(fd: int) -> None:
    """Also the last one: no call is made for it, which would move no byte."""
    views = [np.empty(0, np.uint8), content(3, 1), np.empty(0, np.uint8), np.empty(0, np.uint8)]
    assert pwrite_all(fd, views, 0) == 1
    back = [np.zeros_like(view) for view in views]
    assert pread_all(fd, back, 0) == 1
    assert np.array_equal(back[1], views[1])


def test_a_file_that_ends_before(fd: int) -> None:
    """A file that ends while it is read does not hold what was saved: DataMismatchError."""
    os.pwrite(fd, b"abc", 0)
    with pytest.raises(DataMismatchError, match="ended at 3"):
        pread_all(fd, [np.zeros(4, dtype=np.uint8)], 0)
