"""Targets, options and part sizes of `s3`: valid ones, refused ones, and the body of one part."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from iobench.errors import OptionError, UsageError
from iobench.testing import content, cut
from iobench.units import GIB, MIB, TIB
from iobench.writers.s3_store.client import S3Options
from iobench.writers.s3_store.parts import (
    MOST_BYTES,
    MOST_PARTS,
    PART_LARGEST,
    PART_SMALLEST,
    Checksum,
    PartBody,
    StreamParts,
    part_size_for,
)
from iobench.writers.s3_store.target import S3Target

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


@given(_sizes, _threads)
@example(0, 8)
def test_a_stream_can_always_reach_5_tib(expected: int, threads: int) -> None:
    """Whatever size was announced. The first 7 GiB and more have parts like those of `write`."""
    parts = StreamParts(first_bytes=part_size_for(expected, threads=threads))
    sizes = [parts.size(number) for number in range(1, MOST_PARTS + 1)]
    assert sum(sizes) >= MOST_BYTES
    assert max(sizes) <= PART_LARGEST
    assert sizes == sorted(sizes)
    assert sizes[899] == parts.first_bytes < sizes[900]
    assert 900 * parts.first_bytes > 7 * GIB


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


@pytest.mark.parametrize(
    ("text", "bucket", "key"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://bucket/a/b", "bucket", "a/b"),
        ("s3://bucket/a/b/", "bucket", "a/b"),
        ("s3://my.bucket-1/poids été", "my.bucket-1", "poids été"),
    ],
)
def test_targets(text: str, bucket: str, key: str) -> None:
    """A bucket, and a key without slashes at its ends."""
    assert S3Target.parse(text) == S3Target(bucket=bucket, key=key)
    assert S3Target.parse(str(S3Target.parse(text))) == S3Target.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *("bucket/key", "/tmp", "s3:/bucket", "s3://", "s3:///key", "s3://b", "s3://a b/c"),
        *("s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/./x", f"s3://bucket/{'x' * 1025}"),
        Path("s3://bucket/key"),
    ],
)
def test_no_targets(text: object) -> None:
    """Everything else is a usage error."""
    with pytest.raises(UsageError):
        S3Target.parse(text)


def test_wrong_buckets() -> None:
    """The error shows the name, but not a login that some users write in its place."""
    with pytest.raises(UsageError, match=r"^s3://ab_/x: no bucket is called 'ab_'; a name has 3"):
        S3Target.parse("s3://ab_/x")
    with pytest.raises(UsageError) as caught:
        S3Target.parse("s3://AKID:s3cr3t@bucket/key")
    assert "s3cr3t" not in str(caught.value)


def test_below_and_object() -> None:
    """A prefix has objects below it; an object has a key."""
    assert str(S3Target.parse("s3://bucket").below("a/b")) == "s3://bucket/a/b"
    assert str(S3Target.parse("s3://bucket/x/").below("a")) == "s3://bucket/x/a"
    with pytest.raises(UsageError, match="no object"):
        S3Target.object("s3://bucket")


@pytest.mark.parametrize("size", ["1", "1MiB", str(5 * MIB - 1), "5.1GiB", "-1"])
def test_part_sizes_out_of_range(size: str) -> None:
    """S3 accepts 5 MiB to 5 GiB; with 0 the writer chooses."""
    with pytest.raises(OptionError, match="part_size"):
        S3Options.from_mapping({"part_size": size})
    assert S3Options(part_size=0).part_size == 0


@pytest.mark.parametrize(
    "url",
    [
        *("host:9000", "ftp://s3cr3t", "http://", "http://[broken", "x", "https://k:s3cr3t@host"),
        *(f"http://k:{one}s3cr3t@host" for one in "/@:#[\\"),
        *("http://k:9/s3cr3t@host", "http://s3cr3t/@host", "k:s3cr3t@host", "http://k:s3cr3t@"),
    ],
)
def test_endpoints_that_are_none(url: str) -> None:
    """An endpoint is a URL with scheme and host, or empty. Options are written to files and
    records: a login is refused, and the error does not show it."""
    with pytest.raises(OptionError, match="endpoint_url") as caught:
        S3Options(endpoint_url=url)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("name", ["crc64nvme", "crc32c"])
def test_checksums_of_parts_make_that_of_the_whole(name: str) -> None:
    """For any cut of an object, the combined checksum is that of S3 for the whole."""
    pytest.importorskip("awscrt", reason="awscrt is not installed")
    checksum = Checksum.named(name)
    assert checksum is not None
    data = content(100_000)
    whole = checksum.of([data])
    pieces = cut(data, (1, 0, 4096, 70_000))
    assert checksum.of(pieces) == whole
    assert checksum.combined((checksum.of([piece]), len(piece)) for piece in pieces) == whole
    known = {"crc64nvme": 0xAE8B14860A799888, "crc32c": 0xE3069283}[name]  # of "123456789"
    assert checksum.update(np.frombuffer(b"123456789", dtype=np.uint8)) == known


def test_checksums_that_answers_carry() -> None:
    """Checksums of the whole object count; a checksum of checksums does not."""
    pytest.importorskip("awscrt", reason="awscrt is not installed")
    assert Checksum.named("none") is None
    assert Checksum.of_object({}) is None
    assert Checksum.of_object({"ChecksumCRC32C": "abc=-3", "ChecksumType": "COMPOSITE"}) is None
    found = Checksum.of_object({"ChecksumCRC64NVME": "abc", "ChecksumType": "FULL_OBJECT"})
    assert found == (Checksum(name="crc64nvme"), "abc")
