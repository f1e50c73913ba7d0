"""Targets: the kind that a location selects, and what it refuses."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from iobench.bench.choose import choose, target_of
from iobench.bench.targets.base import OpenTarget
from iobench.bench.targets.bucket import BucketTarget
from iobench.bench.targets.directory import DirectoryTarget
from iobench.errors import TransferError, UsageError
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.target import S3Target


def test_a_directory(tmp_path: Path) -> None:
    """A path is a directory with free space, a device and fio jobs."""
    target = target_of(str(tmp_path), choose("null,buffered", ".")[0])
    assert isinstance(target, DirectoryTarget)
    target.check()
    assert target.location == str(tmp_path.resolve())
    assert target.free_bytes() is not None
    assert (target.no_ceiling, target.notes) == ("", ())
    with target.scratch() as scratch:
        assert scratch.directory is not None
        place = Path(scratch.locate("step"))
        with scratch.staged("step") as staged:
            (Path(staged.directory) / "file").write_bytes(b"x" * 5000)
            staged.publish([b"{}"])
        assert (place / "file").exists()
        assert OpenTarget.at(scratch, target.monitor()).make_cold("step").method != "remote"
        scratch.remove("step")
        scratch.remove("step")
        assert not place.exists()
    assert not os.listdir(tmp_path)


def test_a_bucket() -> None:
    """An s3:// location is a bucket, whose free space is unknown."""
    target = target_of("s3://bucket/run", choose("null,s3", ".")[0])
    assert isinstance(target, BucketTarget)
    assert target.location == "s3://bucket/run"
    assert target.free_bytes() is None
    assert target.monitor().read() is None
    assert target.no_ceiling == "fio does not measure S3"
    assert "unknown" in target.notes[0]


@pytest.mark.parametrize(
    ("location", "writers"),
    [
        ("s3://bucket/run", ["odirect"]),
        ("s3://bucket/run", ["s3", "buffered"]),
        ("s3://bucket/run", ["null"]),
        ("s3://", ["s3"]),
        (".", ["s3"]),
        ("gs://bucket", ["s3"]),
        ("gs://bucket", ["odirect"]),
    ],
)
def test_writers_and_locations_that_do_not_fit(location: str, writers: list[str]) -> None:
    """Each is a usage error."""
    with pytest.raises(UsageError):
        target_of(location, choose(",".join(writers), location)[0])


@pytest.mark.parametrize(("number", "raised"), [(errno.ENOENT, False), (errno.EACCES, True)])
def test_a_lock_that_cannot_be_read(
    number: int, raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix without a lock has no known holder. Any other error may hide a live one."""

    def refuse(_: S3Writer, target: str) -> None:
        raise TransferError(number, "no", target)

    monkeypatch.setattr(S3Writer, "open_source", refuse)
    target = BucketTarget(place=S3Target.parse("s3://bucket/run"), writer=S3Writer())
    with pytest.raises(TransferError) if raised else nullcontext():
        assert target._holder(target.place.below("step")) is None
