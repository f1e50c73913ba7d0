"""Targets and options of `s3`: valid ones, refused ones, and text that is never shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from iobench.errors import OptionError, UsageError
from iobench.testing import content, cut
from iobench.units import MIB
from iobench.writers.s3_store.client import S3Options
from iobench.writers.s3_store.parts import Checksum
from iobench.writers.s3_store.target import S3Target


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


def test_what_no_bucket_is_called() -> None:
    """The error shows the name, and the form of valid names."""
    with pytest.raises(UsageError, match=r"^s3://ab_/x: no bucket is called 'ab_'; a name has 3"):
        S3Target.parse("s3://ab_/x")


def test_a_login_in_a_target_is_not_shown() -> None:
    """Some users write a login in place of the bucket."""
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


@pytest.mark.parametrize("url", ["host:9000", "ftp://host", "http://", "http://[broken", "x"])
def test_endpoints_that_are_none(url: str) -> None:
    """An endpoint is a URL with scheme and host, or empty."""
    with pytest.raises(OptionError, match="endpoint_url"):
        S3Options(endpoint_url=url)


@pytest.mark.parametrize(
    "url",
    [
        *("https://k:s3cr3t@host", "http://s3cr3t@host", "http://h?a=s3cr3t"),
        *(f"http://k:{one}s3cr3t@host" for one in "/@:#[\\"),
        *("http://k:9/s3cr3t@host", "http://s3cr3t/@host", "k:s3cr3t@host", "http://k:s3cr3t@"),
    ],
)
def test_endpoints_with_a_login(url: str) -> None:
    """Options are written to files and records: a login is refused, and the error does not show
    it."""
    with pytest.raises(OptionError) as caught:
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
