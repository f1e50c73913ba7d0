"""kill -9 in each phase of a drain: it goes on where it was and sends nothing twice. Of two
processes that drain one directory one works, the other gets one clear error or waits."""

import secrets
import signal
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.preloaded import Preloaded, run_killed
from support.tiers import events, settled, state, until

from iobench import Checkpointer, Remote, load_checkpoint
from iobench.errors import TargetError
from iobench.remote.journal import JOURNAL
from iobench.remote.source_file import BLOCK_BYTES
from iobench.testing import Bucket
from iobench.units import MIB
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target

pytestmark = pytest.mark.usefixtures("importing")

_TRAINER = """
import sys
from support import kill_points, tiers
from iobench import Checkpointer, Remote, load_writer
from iobench.writers.s3 import S3Writer

local, remote, point = sys.argv[1:4]
writer = S3Writer(part_size="5MiB", threads=1)
if not remote.startswith("s3"):
    writer = load_writer(sys.argv[4], block_size="8MiB")
ckpt = Checkpointer(local, tiers=[Remote(remote, writer=writer)])
kill_points.arm(point)
ckpt.save(tiers.state(2), 2)
tiers.until(lambda: tiers.settled(ckpt))
"""

_SIZE = 20 * 10**6
_BOTH = (
    "iobench.remote.drain.sizes_of:before",
    "iobench.remote.drain.Drain.saved:after",
    "iobench.remote.file_copier.FileCopier.copy:before",
    "iobench.remote.source_file.SourceFile.fill:after:2",
    "iobench.remote.remote.RemoteTier.published:before",
    "iobench.remote.remote.RemoteTier.published:after",
    "iobench.remote.file_copier.read_back:before",
    "iobench.remote.file_copier.read_back:after",
    "iobench.remote.drain.Drain._note:after:2",
    "iobench.remote.drain.Drain._note:after:3",
)
_DIRECTORY = {
    "iobench.writers.file_writer.FileWriter.write_ranges:before": 0,
    "iobench.remote.source_file.SourceFile.fill:before:2": BLOCK_BYTES,
    "iobench.remote.source_file.SourceFile.fill:after:3": 2 * BLOCK_BYTES,
    "iobench.writers.file_writer.FileWriter.write_ranges:after": _SIZE,
    "iobench.remote.remote_copy.DirectoryCopy.publish:before": _SIZE,
    "iobench.checkpoint.store.StagedCheckpoint._write_manifest:after:2": _SIZE,
    "iobench.remote.remote_copy.DirectoryCopy.publish:after": _SIZE,
}
"""Points, and the least bytes that need not be sent again, if one block at a time is written."""
_BUCKET = {
    "iobench.writers.s3_store.upload.ResumedUpload.begin:after": 0,
    "iobench.writers.s3_store.upload.ResumedUpload.send:after:3": 15 * MIB,
    "iobench.writers.s3_store.upload.S3Upload.complete:before": _SIZE,
    "iobench.writers.s3_store.upload.S3Upload.complete:after": _SIZE,
    "iobench.checkpoint.object_store.StagedObjects.publish:before": _SIZE,
    "iobench.checkpoint.object_store.StagedObjects.publish:after": _SIZE,
}


def _sent(local: Path) -> int:
    """Bytes that complete attempts have sent."""
    return sum(one.sent_bytes for one in events(local, "durable"))


@pytest.mark.parametrize(
    ("point", "writer"),
    [
        *((point, "buffered") for point in (*_DIRECTORY, *_BOTH)),
        *((point, "hybrid") for point in [*_DIRECTORY][:4]),  # with several blocks in flight
    ],
)
def test_a_directory(point: str, writer, tmp_path) -> None:
    """The next start finishes it, with what is missing alone, and tidies up."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    run_killed(_TRAINER, local, remote, point, writer)
    assert load_checkpoint(local)["step"] == 2
    before = _sent(local)
    with Checkpointer(local, tiers=[Remote(remote, writer=writer)]) as ckpt:
        until(lambda: ckpt._tier is not None and ckpt._tier.drain.queue.get(2) is not None)
        until(lambda: settled(ckpt))
    assert load_checkpoint(remote)["w"].unique().tolist() == [2]
    assert {path.name for path in remote.iterdir()} == {"step-2", ".iobench-lock"}
    left = {path.name for path in local.iterdir()}
    assert left == {"step-2", ".iobench-lock", JOURNAL}
    again = _sent(local) - before
    least = _DIRECTORY.get(point, 0)
    if writer == "hybrid" and least < _SIZE:
        least = 0  # all of it may be in flight
    assert again <= _SIZE + 10_000 - least


@pytest.mark.parametrize("point", [*_BUCKET, *_BOTH[5:7]])
def test_a_bucket(point: str, moto, tmp_path) -> None:
    """The same; no part that the server has is sent again, and no upload is left."""
    local = tmp_path / "local"
    bucket = Bucket(f"{moto.target}/run-{secrets.token_hex(4)}")
    run_killed(_TRAINER, local, bucket.target, point)
    writer = S3Writer(part_size="5MiB", threads=1)
    before = _sent(local)
    with Checkpointer(local, tiers=[Remote(bucket.target, writer=writer)]) as ckpt:
        until(lambda: ckpt._tier is not None and ckpt._tier.drain.queue.get(2) is not None)
        until(lambda: settled(ckpt))
    assert load_checkpoint(bucket.target, writer=writer)["w"].unique().tolist() == [2]
    assert S3Objects(writer.client, S3Target.parse(bucket.target)).uploads() == []
    again = _sent(local) - before
    assert again <= _SIZE + 10_000 - _BUCKET.get(point, 0)
    writer.client.close()


_FIRST = """
import sys
from support import kill_points, tiers
from iobench import Checkpointer, Remote, load_writer

local, remote = sys.argv[1:]
writer = load_writer("buffered", block_size="8MiB")
ckpt = Checkpointer(local, tiers=[Remote(remote, writer=writer)])
kill_points.arm("iobench.remote.source_file.SourceFile.fill:before:3:hang")
kill_points.arm("iobench.remote.source_file.SourceFile.fill:before:3:note")
ckpt.save(tiers.state(1), 1)
tiers.until(lambda: False)
"""


@contextmanager
def _first(local: Path, remote: Path) -> Iterator[Preloaded]:
    """Run a process that has copied two blocks of its checkpoint, and hangs in the third."""
    with Preloaded(["-c", _FIRST, local, remote], stdout=subprocess.PIPE) as first:
        try:
            assert first.stdout.readline().endswith(":note note\n")
            yield first
        finally:
            first.kill()


def test_the_same_local_directory(tmp_path) -> None:
    """The second process gets an error that names the first one, at once. After a kill -9 of the
    first one it sends only the rest."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    with _first(local, remote) as first:
        for _ in range(2):
            with pytest.raises(TargetError, match=f"in use: process {first.pid} on host"):
                Checkpointer(local, tiers=[Remote(remote)])
        assert not list(remote.glob("step-*"))
        assert load_checkpoint(local)["step"] == 1
        first.send_signal(signal.SIGKILL)
        first.wait()
        with Checkpointer(local, tiers=[Remote(remote)]) as second:
            until(lambda: settled(second))
    (durable,) = events(local, "durable")
    assert durable.sent_bytes <= durable.size_bytes - 2 * BLOCK_BYTES
    assert load_checkpoint(remote)["w"].unique().tolist() == [1]
    assert {path.name for path in remote.iterdir()} == {"step-1", ".iobench-lock"}


def test_the_same_remote_directory(tmp_path) -> None:
    """The second process saves locally and waits; after a kill -9 of the first it copies.

    It removes what the first one has left unfinished, which is sent anew by its next start.
    """
    one, other, remote = (tmp_path / name for name in ("one", "other", "remote"))
    with _first(one, remote) as first, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the drain says it in its own thread
        with Checkpointer(other, tiers=[Remote(remote)]) as second:
            save = second.save(state(2), 2)
            with pytest.raises(TargetError, match=f"in use: process {first.pid} on host"):
                second.wait(until="remote")
            assert [copy.state for copy in save.copies] == ["durable", "waiting"]
            assert not list(remote.glob("step-*"))
            first.send_signal(signal.SIGKILL)
            first.wait()
            until(lambda: settled(second))
            assert [copy.state for copy in save.copies] == ["durable", "verified"]
    (durable,) = events(other, "durable")
    assert durable.sent_bytes > _SIZE
    with Checkpointer(one, tiers=[Remote(remote)]) as again:
        until(lambda: settled(again))
    (durable,) = events(one, "durable")
    assert durable.sent_bytes > _SIZE  # the second one had tidied up
    assert load_checkpoint(remote, 1)["w"].unique().tolist() == [1]
    assert load_checkpoint(remote, 2)["w"].unique().tolist() == [2]
    assert {path.name for path in remote.iterdir()} == {"step-1", "step-2", ".iobench-lock"}
