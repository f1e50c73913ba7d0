"""Sizes of parts, within every limit of S3; and the body of one part."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from iobench.errors import OptionError
from iobench.testing import content, cut
from iobench.units import GIB, MIB, TIB
from iobench.writers.s3_store.parts import (
    MOST_BYTES,
    MOST_PARTS,
    PART_LARGEST,
    PART_SMALLEST,
    PartBody,
    StreamParts,
    part_size_for,
)

_sizes = st.integers(0, MOST_BYTES) | st.sampled_from([0, 1, MOST_BYTES - 1, MOST_BYTES])
_threads = st.integers(1, 256)
_fixed = st.integers(PART_SMALLEST, PART_LARGEST)


@given(_sizes, _threads)
def test_a_chosen_size_keeps_the_limits(size: int, threads: int) -> None:
    """5 MiB to 5 GiB, at most 10,000 parts, and small parts for small objects only."""
    part = part_size_for(size, threads=threads)
    assert PART_SMALLEST <= part <= PART_LARGEST
    assert part * MOST_PARTS >= size
    assert part % MIB == 0
    assert part <= 64 * MIB or (part - MIB) * MOST_PARTS < size


@given(_sizes, _fixed)
def test_a_fixed_size_is_taken_or_refused(size: int, fixed: int) -> None:
    """It is refused exactly if 10,000 parts are not enough; the error names a sufficient size."""
    if fixed * MOST_PARTS >= size:
        assert part_size_for(size, fixed_bytes=fixed) == fixed
    else:
        with pytest.raises(OptionError, match=r"part_size=.* more than 10,000 parts; use at least"):
            part_size_for(size, fixed_bytes=fixed)


def test_more_than_s3_holds() -> None:
    """5 TiB are allowed, and not one byte more."""
    assert part_size_for(5 * TIB) * MOST_PARTS >= 5 * TIB
    with pytest.raises(OptionError, match="split the checkpoint"):
        part_size_for(5 * TIB + 1)


@given(st.none() | _sizes, _threads)
@example(347_087_044_609, 1)
def test_a_stream_can_always_reach_5_tib(expected: int | None, threads: int) -> None:
    """A stream can grow to the largest object, whatever size was announced."""
    parts = StreamParts.expecting(expected, fixed_bytes=0, threads=threads)
    sizes = [parts.size(number) for number in range(1, MOST_PARTS + 1)]
    assert sum(sizes) >= MOST_BYTES
    assert min(sizes) >= PART_SMALLEST
    assert max(sizes) <= PART_LARGEST
    assert sizes == sorted(sizes)


@given(_sizes, _threads)
def test_an_announced_stream_has_even_parts(expected: int, threads: int) -> None:
    """Parts do not grow before the announced end; up to 5,000 of them are those of `write`."""
    parts = StreamParts.expecting(expected, fixed_bytes=0, threads=threads)
    assert parts.size(max(1, -(-expected // parts.first_bytes))) == parts.first_bytes
    as_written = part_size_for(expected, threads=threads)
    if 2 * expected <= as_written * MOST_PARTS:
        assert parts.first_bytes == as_written


def test_streams_start_small() -> None:
    """The first 7 GiB of a stream of unknown length have parts of 8 MiB."""
    parts = StreamParts.expecting(None, fixed_bytes=0, threads=8)
    assert {parts.size(number) for number in range(1, 901)} == {8 * MIB}
    assert parts.size(901) == 16 * MIB
    assert 900 * 8 * MIB > 7 * GIB


def _body(lengths: list[int]) -> tuple[PartBody, bytes]:
    data = content(sum(lengths))
    return PartBody(cut(data, lengths)), data.tobytes()


def _rest(body: PartBody) -> bytes:
    found = b""
    while piece := body.read(1024):
        found += piece
    return found


@given(st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=6), st.integers(0, 6 * MIB))
def test_a_body_can_be_read_from_anywhere(lengths: list[int], offset: int) -> None:
    """Like a request that is repeated, or signed first."""
    body, data = _body(lengths)
    assert len(body) == len(data)
    assert _rest(body) == data
    assert body.seek(offset) == min(offset, len(data)) == body.tell()
    assert _rest(body) == data[offset:]
    assert body.seek(0, io.SEEK_END) == len(data)
    assert body.read() == b""


@given(st.lists(st.integers(1, 2 * MIB), min_size=1, max_size=4), st.integers(1, 3 * MIB))
def test_a_body_can_be_signed(lengths: list[int], room: int) -> None:
    """readinto returns the same bytes, for any size of the reads."""
    body, data = _body(lengths)
    found = bytearray()
    block = bytearray(max(room, len(data) // 20))
    while count := body.readinto(block):
        found += block[:count]
    assert found == data


def test_a_body_is_no_copy() -> None:
    """The socket gets the memory itself."""
    memory = np.zeros(3 * MIB, dtype=np.uint8)
    body = PartBody([memory])
    piece = body.read()
    memory[0] = 7
    assert isinstance(piece, memoryview)
    assert piece[0] == 7
    assert len(piece) == MIB
