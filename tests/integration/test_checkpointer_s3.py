"""Checkpointer on a bucket: the manifest object is the commit."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from iobench import Checkpointer, KeepLast, load_checkpoint
from iobench.checkpoint.staged_objects import StagedObjects
from iobench.errors import (
    DataMismatchError,
    TargetError,
    TransferError,
    UnavailableError,
    UsageError,
)
from iobench.testing import Bucket, LocalS3, local_s3, moto_s3
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target

_SERVERS = {"rclone": local_s3, "moto": moto_s3}


@pytest.fixture(scope="module", params=_SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[LocalS3]:
    """Each of the two servers."""
    try:
        with _SERVERS[request.param]() as running:
            yield running
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def bucket(server: LocalS3) -> Iterator[Bucket]:
    """A prefix of the test's own."""
    with server.active():
        yield Bucket(f"{server.target}/run-{secrets.token_hex(4)}")


@pytest.fixture
def writer(bucket: Bucket) -> Iterator[S3Writer]:
    """The writer that talks to that server."""
    made = S3Writer(part_size="5MiB", threads=2)
    yield made
    made.client.close()


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((2_000_000,), value), "tied": [torch.zeros(3)] * 2, "step": value}


def test_saved_kept_loaded(bucket: Bucket, writer: S3Writer) -> None:
    """As on a directory: background saves, retention, restore of any step, verified."""
    with Checkpointer(bucket.target, writer=writer, keep=KeepLast(2)) as ckpt:
        for step in (1, 2, 10):
            state = _state(step)
            ckpt.save_async(state, step)
            state["w"].fill_(-1)
            ckpt.wait()
        assert ckpt.steps() == [2, 10]
        loaded = ckpt.load()
        assert (loaded["w"] == 10).all()
        assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr()
        with pytest.raises(UsageError, match="step 10 is saved already, in s3://"):
            ckpt.save(_state(10), 10)
    assert (load_checkpoint(bucket.target, 2, writer=writer)["w"] == 2).all()
    names = {f"step-{n}/{f}" for n in (2, 10) for f in ("tensors.safetensors", "state.json")}
    assert bucket.names() == names | {"step-2/manifest.json", "step-10/manifest.json"}


def test_damaged_and_unfinished(bucket: Bucket, writer: S3Writer) -> None:
    """Without a manifest it is no checkpoint and is cleaned up; damage is found."""
    with Checkpointer(bucket.target, writer=writer) as ckpt:
        for step in (1, 2):
            ckpt.save(_state(step), step)
    held = bytearray(bucket.stored("step-2/tensors.safetensors") or b"")
    held[-5] ^= 1
    bucket.put("step-2/tensors.safetensors", bytes(held))
    bucket.put("step-3/tensors.safetensors", b"half")
    bucket.put("other/notes", b"mine")
    with Checkpointer(bucket.target, writer=writer) as ckpt:
        assert ckpt.latest() == 2
        assert "step-3/tensors.safetensors" not in bucket.names()
        assert bucket.stored("other/notes") == b"mine"
        with pytest.raises(DataMismatchError, match=r" 1 of \d+ checksums differ: tied.0"):
            ckpt.load()
        with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
            assert ckpt.load(on_corrupt="previous")["step"] == 1
        ckpt.save_async(_state(22), 2)
        assert ckpt.load()["step"] == 22


def test_replaced(bucket: Bucket, writer: S3Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of the same step stays until the new one has its manifest."""
    with Checkpointer(bucket.target, writer=writer) as ckpt:
        for step in (1, 2):
            ckpt.save({"step": step}, step)
        ckpt.load(1)
        with monkeypatch.context() as patch:
            patch.setattr(StagedObjects, "publish", _refuse)
            with pytest.raises(TransferError, match="refused"):
                ckpt.save({"step": 20}, 2)
        assert ckpt.steps() == [1, 2]
        assert load_checkpoint(bucket.target, 2, writer=writer) == {"step": 2}
        for value in (20, 21):
            ckpt.save({"step": value}, 2)
            assert load_checkpoint(bucket.target, writer=writer) == {"step": value}
            ckpt.load(1)
        assert {name.partition("/")[0] for name in bucket.names()} == {"step-1", "step-2.2"}
        bucket.put("step-2/manifest.json", b"{}")  # as if killed before it was removed
        bucket.put("step-2.3/state.json", b"half")
    with Checkpointer(bucket.target, writer=writer) as ckpt:
        assert {name.partition("/")[0] for name in bucket.names()} == {"step-1", "step-2.2"}
        assert ckpt.load(2) == {"step": 21}
        ckpt.remove(2)
        assert {name.partition("/")[0] for name in bucket.names()} == {"step-1"}


def test_removals_that_fail(
    bucket: Bucket, writer: S3Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings, once; no save fails for them, and what others removed is no failure at all."""

    def refuse(objects: S3Objects, keys: list[str]) -> None:
        if any("step-1" in key or "step-2" in key for key in keys):
            raise TransferError(errno.EACCES, "deleting: AccessDenied", keys[0])
        delete(objects, keys)

    delete = S3Objects.delete
    ckpt = Checkpointer(bucket.target, writer=writer, keep=KeepLast(2))
    with monkeypatch.context() as patch, ckpt:
        patch.setattr(S3Objects, "delete", refuse)
        for step in (1, 2):
            ckpt.save({"step": step}, step)
        ckpt.load(1)
        with pytest.warns(RuntimeWarning, match="cannot be removed .*AccessDenied.*step-2"):
            ckpt.save({"step": 20}, 2)
        with pytest.warns(RuntimeWarning, match="cannot be removed .*AccessDenied.*step-1"):
            ckpt.save({"step": 3}, 3)
        with pytest.warns(RuntimeWarning, match="cannot be removed .*AccessDenied.*step-2"):
            ckpt.save({"step": 4}, 4)
        ckpt.save({"step": 5}, 5)
        assert ckpt.steps() == [1, 2, 4, 5]
        assert ckpt.load(2) == {"step": 20}
    with monkeypatch.context() as patch:
        patch.setattr(S3Objects, "delete", refuse)
        with pytest.warns(RuntimeWarning, match="cannot be removed .*AccessDenied.*step-2"):
            ckpt = Checkpointer(bucket.target, writer=writer, keep=KeepLast(2))
    with ckpt:
        S3Objects(writer.client, S3Target.parse(f"{bucket.target}/step-4")).remove()
        for step in (6, 7):
            ckpt.save({"step": step}, step)
        assert ckpt.steps() == [6, 7]


def test_many_old_checkpoints(
    bucket: Bucket, writer: S3Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request makes them no checkpoints; a save removes the objects of a few, `close` all."""
    with Checkpointer(bucket.target, writer=writer) as ckpt:
        for step in range(12):
            ckpt.save({"step": step}, step)
    delete, requests = S3Objects.delete, []

    def counted(objects: S3Objects, keys: list[str]) -> None:
        requests.append(keys)
        delete(objects, keys)

    def left() -> int:
        return len({name.partition("/")[0] for name in bucket.names()} - {"step-20", "step-0"})

    monkeypatch.setattr(S3Objects, "delete", counted)
    ckpt = Checkpointer(bucket.target, writer=writer, keep=KeepLast(1))
    with ckpt:
        ckpt.save({"step": 20}, 20)
        assert ckpt.steps() == [20]
        assert sorted(requests[0]) == sorted(
            S3Target.parse(f"{bucket.target}/step-{n}/manifest.json").key for n in range(12)
        )
        assert left() == 3  # and step-0, the fourth
        ckpt.load(20)
        ckpt.save({"step": "again"}, 0)  # in place of objects that are left
        assert ckpt.steps() == [0]
        assert ckpt.load() == {"step": "again"}
    assert {name.partition("/")[0] for name in bucket.names()} == {"step-0"}


def _refuse(*_: Any) -> None:
    raise TransferError(errno.EIO, "refused", "manifest.json")


def test_nothing_there(bucket: Bucket, writer: S3Writer) -> None:
    """An empty prefix holds no checkpoint."""
    with pytest.raises(TargetError, match="holds no complete checkpoint"):
        load_checkpoint(bucket.target, writer=writer)
