"""kill -9 in each phase of a drain: it goes on where it was and sends nothing twice."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from support.preloaded import run_killed
from support.tiers import events, settled, until

from iobench import Checkpointer, Remote, load_checkpoint
from iobench.remote.journal import JOURNAL
from iobench.remote.source_file import BLOCK_BYTES
from iobench.testing import Bucket, LocalS3
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
    "iobench.remote.file_copier.DrainStep.send:before",
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
    "iobench.remote.directory_copy.DirectoryCopy.publish:before": _SIZE,
    "iobench.checkpoint.staged.StagedCheckpoint._write_manifest:after:2": _SIZE,
    "iobench.remote.directory_copy.DirectoryCopy.publish:after": _SIZE,
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
def test_a_directory(point: str, writer: str, tmp_path: Path) -> None:
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
def test_a_bucket(point: str, moto: LocalS3, tmp_path: Path) -> None:
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
