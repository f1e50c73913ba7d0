"""Direct writes and reads: short ones are continued, if the alignment permits it."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iobench.testing import content
from iobench.writers.local.direct_file import pread_direct, pwrite_direct

_ALIGNMENT = 512
_SAME_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


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
def test_short_writes_are_continued(fd: int, blocks: int, limits: list[int], offset: int) -> None:
    """Short writes, at and off alignment, are continued from the last aligned byte."""
    data = content(blocks * _ALIGNMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", _Kernel(list(limits)).pwrite)
        calls = pwrite_direct(fd, data, offset * _ALIGNMENT, _ALIGNMENT)
    assert os.pread(fd, len(data), offset * _ALIGNMENT) == data.tobytes()
    assert 1 <= calls <= len(limits) + 1


@_SAME_FILE
@given(wanted=st.integers(1, 8 * _ALIGNMENT), limits=_LIMITS, offset=st.integers(0, 4))
def test_short_reads_are_continued(fd: int, wanted: int, limits: list[int], offset: int) -> None:
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
