"""A rank is killed in a direct save to the remote tier; the job starts again with more ranks."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from support.tiers import events

from iobench import load_checkpoint
from iobench.checkpoint.manifest import MANIFEST
from iobench.testing import LocalS3
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
_POINTS = [
    (1, "iobench.writers.s3_store.upload.S3Upload.send:after:1", 1),
    (0, f"{_STORE}:before", 1),
]
_MORE = [(1, f"{_PART}:before", 1), (1, f"{_PART}:after", 1), (0, f"{_STORE}:after", 2)]
"""The rank that is lost, where, and the newest step after that."""


@pytest.mark.parametrize(
    ("victim", "point", "newest"),
    [*_POINTS, *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in _MORE)],
)
def test_a_bucket(victim: int, point: str, newest: int, rclone: LocalS3, tmp_path: Path) -> None:
    """No part of the checkpoint is visible, nothing is written locally, and nothing is left."""
    local, remote = tmp_path / "local", f"{rclone.target}/run-{secrets.token_hex(4)}"
    code = _TRAINER.format(arguments=(str(local), remote, victim, point))
    lose(code, victim)
    assert not list(local.glob("*step-*"))
    assert load_checkpoint(remote, writer="s3")["w"].unique().tolist() == [newest]
    code = _TRAINER.format(arguments=(str(local), remote, None, ""))
    with start_ranks(code, 3) as ranks:
        for ended, out, said in ranks.ends():
            assert (ended, out) == (0, f"[{float(newest)}]\n"), said
    assert [one.step for one in events(local, "placed")][-1:] == [3]
    assert load_checkpoint(remote, writer="s3")["w"].unique().tolist() == [3]
    writer = S3Writer()
    objects = S3Objects(writer.client, S3Target.parse(remote))
    assert objects.uploads() == []
    keys = objects.keys()
    writer.client.close()
    published = {key.rsplit("/", 1)[0] for key in keys if key.endswith(MANIFEST)}
    assert {key.rsplit("/", 1)[0] for key in keys} == published
    assert not [key for key in keys if key.rsplit("/", 1)[-1].startswith("part-")]
