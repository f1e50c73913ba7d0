"""Placement of several ranks: rank 0 chooses the tier, and every rank writes its file there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiers import events, names

import iobench
from iobench.testing import LocalS3
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target
from tests.support import rank_placed
from tests.support.rank_pool import RankPool


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_to_the_faster_tier(
    ranks: RankPool,
    moto: LocalS3,
    tmp_path: Path,
    kind: str,
    iobench_inside: Callable[..., Any],
) -> None:
    """A direct save has one copy, which every rank names; manifest and `iobench tiers` say why."""
    local, bucket = tmp_path / "local", kind == "bucket"
    remote = f"{moto.target}/placed" if bucket else str(tmp_path / "remote")
    environ = dict(moto.environment) if bucket else {}
    found = ranks.first(2).call(rank_placed.placed, str(local), remote, environ, not bucket)
    for one in found:
        memory = [] if bucket else [["memory", "volatile"]]
        assert one["first"][-2:] == ["durable", "verified"]
        assert one["second"] == [*memory, [remote, "durable"]]
        assert (one["latest"], one["right"]) == (2, True)
        assert one["sources"] == {remote if bucket else "memory": "read"}
        assert one["third"] == str(local)
        assert (one["steps"], one["left"]) == ([1, 2, 3], [1, 3])
    assert names(local) == {"step-1", "step-3"}
    placed = events(local, "placed")
    assert [(one.step, one.where) for one in placed] == [(1, "local"), (2, "remote"), (3, "local")]
    direct = next(one for one in events(local, "durable") if one.step == 2)
    assert direct.size_bytes == direct.sent_bytes > 1_700_000  # of all ranks
    manifest = json.loads((local / "step-3" / "manifest.json").read_text())
    assert manifest["writer"]["placement"] == placed[2].why
    with moto.active():
        state = iobench.load_checkpoint(remote, 3, writer="s3" if bucket else "hybrid")
    assert state["epoch"] == 8


@pytest.mark.parametrize(
    ("victim", "before"),
    [(1, False), *(pytest.param(one, True, marks=pytest.mark.exhaustive) for one in (0, 1))],
)
def test_a_direct_save_that_fails_in_one_rank(
    ranks: RankPool, moto: LocalS3, tmp_path: Path, victim: int, before: bool
) -> None:
    """All ranks write it to the local tier, and the copy goes on; the bucket has nothing else."""
    local, remote = tmp_path / "local", f"{moto.target}/fails-{victim}-{before}"
    call = rank_placed.fails
    environ = dict(moto.environment)
    found = ranks.first(2).call(call, str(local), remote, environ, victim, before)
    for one in found:
        assert one["status"] == "committed"
        assert one["copy"] == [str(local), "durable"]
        assert one["wrote"] == [True, False]
        assert one["steps"] == [1, 2]
    (message,) = [text for text in found[0]["said"] if "is written to" in text]
    assert message.startswith(f"step 1 is written to {local}, because {remote} failed: rank")
    assert "Connection timed out" in message
    assert found[1]["said"] == []
    assert [one.step for one in events(local, "placed")] == [1, 2]
    assert events(local, "placed")[0].where == "local"
    with moto.active():
        assert iobench.load_checkpoint(remote, 1, writer="s3")["epoch"] == 6
        writer = S3Writer()
        objects = S3Objects(writer.client, S3Target.parse(remote))
        assert objects.uploads() == []
        keys = objects.keys()
        writer.client.close()
    assert not [key for key in keys if key.rsplit("/", 1)[-1].startswith("part-")]


def test_a_bucket_that_does_not_answer_one_rank(
    ranks: RankPool, moto: LocalS3, tmp_path: Path
) -> None:
    """Its part of a direct save has a limit; then all ranks write to the local tier."""
    local, remote = tmp_path / "local", f"{moto.target}/late"
    found = ranks.first(2).call(rank_placed.late, str(local), remote, dict(moto.environment))
    for one in found:
        assert (one["status"], one["copy"], one["steps"]) == ("committed", str(local), [1])
    (message,) = found[0]["said"]
    assert "rank 1" in message
    assert "not written within 500 ms" in message
    assert iobench.load_checkpoint(local)["epoch"] == 6


def test_the_local_tier_is_measured_by_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Each writes a part; nothing is left of it."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    found = ranks.first(3).call(rank_placed.measures, str(local), str(remote))
    assert len(found[0]) == 2
    assert all(1_500_000 < size <= 4 << 20 for size in found[0])
    assert names(local) == set()
    assert names(remote) == {"step-1", "step-2"}


def test_not_with_replicas(ranks: RankPool, tmp_path: Path) -> None:
    """Told in each rank."""
    found = ranks.first(2).call(rank_placed.refused, str(tmp_path / "a"), str(tmp_path / "b"))
    assert all("placement: not with replicate" in text for text in found)
