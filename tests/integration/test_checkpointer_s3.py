"""Checkpointer on a bucket: the manifest object is the commit."""

import errno
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from iobench import Checkpointer, KeepLast, load_checkpoint
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.object_store import ObjectStore, StagedObjects
from iobench.errors import DataMismatchError, TargetError, TransferError, UsageError
from iobench.testing import Bucket
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target
from iobench.writers.transfer import Meter


@pytest.fixture
def writer(bucket: Bucket) -> Iterator[S3Writer]:
    """A writer for that server."""
    made = S3Writer(part_size="5MiB", threads=2)
    yield made
    made.client.close()


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((2_000_000,), value), "tied": [torch.zeros(3)] * 2, "step": value}


def test_saved_kept_loaded(bucket, writer) -> None:
    """Like on a directory: background saves, retention, verified restore of any step."""
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
    serials = {"step-2/serial-2", "step-10/serial-3"}
    assert bucket.names() == names | serials | {"step-2/manifest.json", "step-10/manifest.json"}


def test_damaged_and_unfinished(bucket, writer) -> None:
    """A prefix without a manifest is not a checkpoint and is removed; damage is found."""
    with Checkpointer(bucket.target, writer=writer) as ckpt:
        for step in (1, 2):
            ckpt.save(_state(step), step)
    held = bytearray(bucket.stored("step-2/tensors.safetensors") or b"")
    held[-5] ^= 1
    bucket.put("step-2/tensors.safetensors", bytes(held))
    bucket.put("step-3/tensors.safetensors", b"half")
    bucket.put("other/notes", b"mine")
    manifest = S3Target.parse(f"{bucket.target}/step-4/manifest.json")
    where = {"Bucket": manifest.bucket, "Key": manifest.key}
    writer.client.call(
        lambda s3: s3.create_multipart_upload(**where), Meter(), doing="beginning", where=manifest
    )
    assert load_checkpoint(bucket.target, 1, writer=writer)["step"] == 1
    with pytest.raises(TargetError, match=r"step 4; it holds \[1, 2\]"):
        load_checkpoint(bucket.target, 4, writer=writer)
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


def test_replaced(bucket, writer, monkeypatch) -> None:
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


def test_removals_that_fail(bucket, writer, monkeypatch) -> None:
    """They warn once and fail no save. Objects that others removed are not failures."""

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


def _manifests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps whose manifests are read from now on."""
    manifest, read = ObjectStore.manifest, []

    def counted(store: ObjectStore, step: int, **options: Any) -> Manifest:
        read.append(step)
        return manifest(store, step, **options)

    monkeypatch.setattr(ObjectStore, "manifest", counted)
    return read


def test_the_latest_needs_one_manifest(bucket, writer, monkeypatch) -> None:
    """Its age is in the listing, also where training went back and a lower step is newer."""
    with Checkpointer(bucket.target, writer=writer) as ckpt:
        for step in (100, 200, 300):
            ckpt.save({"step": step}, step)
        ckpt.load(200)
        ckpt.save({"step": 210}, 210)
    read = _manifests(monkeypatch)
    with Checkpointer(bucket.target, writer=writer) as ckpt:
        assert ckpt.latest() == 210
        assert ckpt.load() == load_checkpoint(bucket.target, writer=writer) == {"step": 210}
        assert read == [210, 210]
        ckpt.load(100)
        ckpt.save({"step": 300.5}, 300)  # reads the rest once, for retention
        assert (ckpt.latest(), ckpt.load()) == (300, {"step": 300.5})
    S3Objects(writer.client, S3Target.parse(f"{bucket.target}/step-210/serial-4")).remove()
    del read[:]
    with Checkpointer(bucket.target, writer=writer) as ckpt:  # step 210 is of an older version
        assert load_checkpoint(bucket.target, writer=writer) == ckpt.load() == {"step": 300.5}
    assert set(read) == {210, 300}
    bucket.put("step-300.1/serial-9", b"")  # two of them: the manifest decides
    assert load_checkpoint(bucket.target, writer=writer) == {"step": 300.5}
    S3Objects(writer.client, S3Target.parse(f"{bucket.target}/step-300.1/serial-5")).remove()
    with pytest.raises(DataMismatchError, match="serial number 5, and the object serial-9"):
        load_checkpoint(bucket.target, writer=writer)


def _refuse(*_: Any) -> None:
    raise TransferError(errno.EIO, "refused", "manifest.json")


def test_nothing_there(bucket, writer) -> None:
    """An empty prefix has no checkpoint."""
    with pytest.raises(TargetError, match="holds no complete checkpoint"):
        load_checkpoint(bucket.target, writer=writer)
