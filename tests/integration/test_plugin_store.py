"""A writer of somebody else that takes `s3://` works wherever ours does, or the error is clear.

It is not a subclass of S3Writer: what uses more than the interface of `Writer` fails here.
"""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from iobench import Checkpointer, KeepLast, load_checkpoint
from iobench.bench.contenders.base import WriterContender
from iobench.bench.targets.bucket import BucketTarget
from iobench.errors import UsageError
from iobench.integrations.dcp import StorageReader, StorageWriter
from iobench.remote.remote import Remote
from iobench.testing import Bucket, LocalS3, writer_checks
from iobench.writers import StoredObjects, Writer
from iobench.writers.options import WriterOptions
from iobench.writers.removal import remove_file
from iobench.writers.s3 import S3Options, S3Writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class _WithoutObjects(Writer):
    """Writes and reads, and neither lists nor deletes."""

    name = "other-store"
    summary = "a writer of somebody else"
    schemes = ("s3",)
    Options = S3Options

    def __init__(self, options: WriterOptions | None = None, **values: Any) -> None:
        super().__init__(options, **values)
        self._client = S3Writer(self.options)

    def write(self, image: Any, target: Any, **how: Any) -> Any:
        return self._client.write(image, target, **how)

    def read(self, image: Any, target: Any, **where: Any) -> Any:
        return self._client.read(image, target, **where)

    def open(self, target: Any, size: int | None = None) -> Any:
        return self._client.open(target, size)

    def open_source(self, target: Any) -> Any:
        return self._client.open_source(target)

    def available(self, target: Any = ".") -> Any:
        return self._client.available(target)

    def close(self) -> None:
        self._client.close()


class _Store(_WithoutObjects):
    """A whole writer of an object store."""

    def objects(self, target: str | Path) -> StoredObjects:
        return self._client.objects(target)


@pytest.fixture
def bucket(moto: LocalS3) -> Iterator[Bucket]:
    """A prefix of its own for each test."""
    with moto.active():
        yield Bucket(f"{moto.target}/run-{secrets.token_hex(4)}")


@pytest.fixture(params=[_Store, _WithoutObjects])
def writer(request: pytest.FixtureRequest, bucket: Bucket) -> Iterator[Writer]:
    """A writer for that server."""
    del bucket  # the server's address is in the environment
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def refused(writer: Writer) -> Any:
    """A context manager: the body works with `objects`, and raises UsageError without."""
    if isinstance(writer, _Store):
        return contextlib.nullcontext()
    # torch wraps the error of a rank
    refusals = (UsageError, CheckpointException)
    return pytest.raises(refusals, match="'other-store' does not list and delete objects")


def test_checkpoints(bucket, writer, refused) -> None:
    """Saves, retention, a removal and a load."""
    with refused, Checkpointer(bucket.target, writer=writer, keep=KeepLast(2)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"w": torch.full((1000,), float(step))}, step)
        assert ckpt.steps() == [2, 3]
        ckpt.remove(2)
        assert load_checkpoint(bucket.target, writer=writer)["w"][0] == 3
        assert {name.partition("/")[0] for name in bucket.names()} == {"step-3"}


def test_removed_files(bucket, writer, refused) -> None:
    """DCP overwrites a checkpoint, and Lightning removes one, by it."""
    bucket.put("file", b"data")
    state = {"w": torch.ones(10)}
    dcp.save(state, storage_writer=StorageWriter(bucket.target, writer))
    with refused:
        dcp.save({"w": torch.zeros(10)}, storage_writer=StorageWriter(bucket.target, writer))
        dcp.load(state, storage_reader=StorageReader(bucket.target, writer))
        assert not state["w"].any()
    with refused:
        remove_file(f"{bucket.target}/file", writer)
        assert bucket.stored("file") is None


def test_a_run(bucket, writer, refused) -> None:
    """`iobench run` measures it with its own locks and removals."""
    contender = WriterContender(writer)
    target = BucketTarget.of(bucket.target, [contender])
    assert target.writer is writer
    with refused:
        assert target.describe()[1].endpoint.startswith("http://")
        with target.scratch() as scratch:
            bucket.put(f"{scratch.location.rpartition('/')[2]}/left", b"data")
            assert len(bucket.names()) == 2
        assert not bucket.names()


def test_a_remote_tier(bucket, writer) -> None:
    """Its copies need more than the interface: the error says so, before anything is saved."""
    with pytest.raises(UsageError, match="writer 'other-store' does not do; choose the"):
        Remote(bucket.target, writer=writer).new_writer()


@pytest.mark.parametrize(
    "check", [one for one in writer_checks() if "objects" in one.name], ids=str
)
def test_the_suite_asks_for_it(check: Any, bucket) -> None:
    """A writer of a store whose `objects` is missing or wrong fails the conformance suite."""

    class Deaf(_Store):
        def objects(self, target: str | Path) -> StoredObjects:
            made = super().objects(target)
            made.delete = list  # type: ignore[assignment,method-assign]  # does nothing
            return made

    check(_Store, Bucket(f"{bucket.target}/good"))
    for wrong in (Deaf, _WithoutObjects):
        with pytest.raises((AssertionError, UsageError)):
            check(wrong, Bucket(f"{bucket.target}/{wrong.__name__}"))
