"""A rank is lost while the ranks copy a checkpoint to the remote tier, or save directly to it: the
next start goes on."""

import secrets
from pathlib import Path

import pytest
from support.tiers import events, settled, until

from iobench import Checkpointer, Remote, load_checkpoint
from iobench.checkpoint.manifest import MANIFEST
from iobench.remote.journal import JOURNAL
from iobench.remote.source_file import BLOCK_BYTES
from iobench.units import MIB
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target
from tests.support.ranks import lose, start_ranks

pytestmark = pytest.mark.usefixtures("importing")

_TRAINER = """
import sys, time
sys.path.insert(0, "tests")
from support import kill_points, tiers
from support.rank_scripts import joined
from iobench import Checkpointer, Remote, load_writer
from iobench.errors import RankError
from iobench.writers.s3 import S3Writer

local, remote, victim, point = {arguments!r}
world = joined()
writer = S3Writer(part_size="5MiB", threads=1)
if not remote.startswith("s3"):
    writer = load_writer("buffered", block_size="8MiB")
try:
    with Checkpointer(local, tiers=[Remote(remote, writer=writer)]) as ckpt:
        if victim is None:  # the next start
            ckpt.wait(until="remote")
            raise SystemExit
        if world.rank == victim:
            kill_points.arm(point)
        ckpt.save(tiers.state(2), 2)
        ckpt.wait(until="remote")
        while True:
            ckpt.latest()
            time.sleep(0.02)
except RankError as error:
    print("lost", list(error.ranks), flush=True)
    raise SystemExit(3)
"""

_FILE = 10**7
"""Bytes that each of the two ranks copies."""
_COPIER = "iobench.remote.file_copier.FileCopier"
_POINTS = [
    (1, f"{_COPIER}.next:after", 0),
    (1, "iobench.remote.source_file.SourceFile.fill:after:2", BLOCK_BYTES),
    (1, f"{_COPIER}.done:after:1:stop", _FILE),
    (1, "iobench.remote.file_copier.read_back:before", 2 * _FILE),
    (0, "iobench.remote.source_file.SourceFile.fill:before:2", BLOCK_BYTES),
    (0, f"{_COPIER}._together:after", 2 * _FILE),
    (0, "iobench.remote.remote.RemoteTier.published:after", 2 * _FILE),
]
"""The rank that is lost, where, and the least bytes that need not be sent again."""
_BUCKET = [
    (1, "iobench.writers.s3_store.upload.ResumedUpload.send:after:1", 5 * MIB),
    (0, "iobench.checkpoint.object_store.StagedObjects.publish:before", 2 * _FILE),
]


def _lose(local: Path, remote: object, victim: int, point: str) -> None:
    """Run two ranks until one is lost; the other one ends with its number."""
    code = _TRAINER.format(arguments=(str(local), str(remote), victim, point))
    lose(code, victim, killed=not point.endswith("stop"))


@pytest.mark.parametrize(("victim", "point", "least"), _POINTS)
def test_a_directory(victim: int, point: str, least: int, tmp_path) -> None:
    """Nothing is published in part; the next start, of one process, sends what is missing."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    _lose(local, remote, victim, point)
    assert load_checkpoint(local)["step"] == 2
    before = sum(one.sent_bytes for one in events(local, "durable"))
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        until(lambda: ckpt._tier is not None and ckpt._tier.drain.queue.get(2) is not None)
        until(lambda: settled(ckpt))
    state = load_checkpoint(remote)
    assert state["w"].unique().tolist() == [2]
    assert {path.name for path in remote.iterdir()} == {"step-2", ".iobench-lock"}
    assert {path.name for path in local.iterdir()} == {"step-2", ".iobench-lock", JOURNAL}
    again = sum(one.sent_bytes for one in events(local, "durable")) - before
    assert again <= 2 * _FILE + 20_000 - least


def test_a_restart_of_all_ranks(tmp_path) -> None:
    """At the same world size, too, only what is missing is sent."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    _lose(local, remote, 0, "iobench.remote.source_file.SourceFile.fill:before:2")
    code = _TRAINER.format(arguments=(str(local), str(remote), None, ""))
    with start_ranks(code, 2) as ranks:
        for rank in (0, 1):
            ended, out, said = ranks.end(rank)
            assert (ended, out) == (0, ""), said
    assert load_checkpoint(remote)["w"].unique().tolist() == [2]
    assert {path.name for path in remote.iterdir()} == {"step-2", ".iobench-lock"}
    sent = sum(one.sent_bytes for one in events(local, "durable"))
    assert sent <= 2 * _FILE + 20_000 - BLOCK_BYTES


@pytest.mark.parametrize(("victim", "point", "least"), _BUCKET)
def test_a_bucket(victim: int, point: str, least: int, moto, tmp_path) -> None:
    """The same; no part that the server has is sent again, and no upload is left."""
    local, remote = tmp_path / "local", f"{moto.target}/run-{secrets.token_hex(4)}"
    _lose(local, remote, victim, point)
    writer = S3Writer(part_size="5MiB", threads=1)
    before = sum(one.sent_bytes for one in events(local, "durable"))
    with Checkpointer(local, tiers=[Remote(remote, writer=writer)]) as ckpt:
        until(lambda: ckpt._tier is not None and ckpt._tier.drain.queue.get(2) is not None)
        until(lambda: settled(ckpt))
    assert load_checkpoint(remote, writer=writer)["w"].unique().tolist() == [2]
    assert S3Objects(writer.client, S3Target.parse(remote)).uploads() == []
    again = sum(one.sent_bytes for one in events(local, "durable")) - before
    assert again <= 2 * _FILE + 20_000 - least


_PLACING = """
import sys, time
sys.path.insert(0, "tests")
from support import kill_points, tiers
from support.rank_scripts import joined
from iobench import Checkpointer, Placement, Remote
from iobench.errors import RankError
from iobench.writers.s3 import S3Writer

local, remote, victim, point = {arguments!r}
world = joined()
writer = S3Writer(part_size="5MiB", threads=1) if remote.startswith("s3") else ""
placement = Placement(goal="capacity")
try:
    with Checkpointer(local, tiers=[Remote(remote, writer=writer)], placement=placement) as ckpt:
        if ckpt._tier is not None and ckpt._tier.drain.leads:
            tiers.until(lambda: ckpt._tier.remote.is_open)
        if victim is None:  # the next start
            print(ckpt.load()["w"].unique().tolist(), flush=True)
            ckpt.save(tiers.state(3, 10), 3)
            raise SystemExit
        ckpt.save(tiers.state(1, 10), 1)
        if world.rank == victim:
            kill_points.arm(point)
        ckpt.save(tiers.state(2, 3_000_000), 2)
        while True:
            ckpt.latest()
            time.sleep(0.02)
except RankError as error:
    print("lost", list(error.ranks), flush=True)
    raise SystemExit(3)
"""

_PART = "iobench.checkpoint.ranked.dcp_files.DcpFormat.write"
_STORE = "iobench.checkpoint.object_store.StagedObjects.publish"
_DIRECT = [
    (1, "iobench.writers.s3_store.upload.S3Upload.send:after:1", 1),
    (0, f"{_STORE}:before", 1),
]
_MORE_DIRECT = [(1, f"{_PART}:before", 1), (1, f"{_PART}:after", 1), (0, f"{_STORE}:after", 2)]
"""The rank that is lost, where, and the newest step after that."""


@pytest.mark.parametrize(
    ("victim", "point", "newest"),
    [*_DIRECT, *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in _MORE_DIRECT)],
)
def test_a_direct_save(victim: int, point: str, newest: int, rclone, tmp_path) -> None:
    """No part of the checkpoint is visible, nothing is written locally, and nothing is left."""
    local, remote = tmp_path / "local", f"{rclone.target}/run-{secrets.token_hex(4)}"
    code = _PLACING.format(arguments=(str(local), remote, victim, point))
    lose(code, victim)
    assert not list(local.glob("*step-*"))
    assert load_checkpoint(remote, writer="s3")["w"].unique().tolist() == [newest]
    code = _PLACING.format(arguments=(str(local), remote, None, ""))
    with start_ranks(code, 3) as ranks:
        for ended, out, said in ranks.ends():
            assert (ended, out) == (0, f"[{float(newest)}]\n"), said
    assert [one.step for one in events(local, "durable")][-1:] == [3]
    assert not events(local, "saved")
    assert load_checkpoint(remote, writer="s3")["w"].unique().tolist() == [3]
    writer = S3Writer()
    objects = S3Objects(writer.client, S3Target.parse(remote))
    assert objects.uploads() == []
    keys = objects.keys()
    writer.client.close()
    published = {key.rsplit("/", 1)[0] for key in keys if key.endswith(MANIFEST)}
    assert {key.rsplit("/", 1)[0] for key in keys} == published
    assert not [key for key in keys if key.rsplit("/", 1)[-1].startswith("part-")]
