"""A remote tier of several ranks: each rank copies a share, and all restore from both tiers."""

import json
import os
import shutil

import pytest
from support.filesystems import no_private_mounts
from support.tiers import damage, events, names

import iobench
from iobench.testing import LocalS3
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target
from tests.support import rank_saves, rank_tiers


def _environment(server: LocalS3) -> dict[str, str]:
    return dict(server.environment)


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_each_rank_copies_its_files(ranks, moto, tmp_path, kind) -> None:
    """Rank 0 publishes; every rank knows the states; local retention waits for the copies."""
    local = tmp_path / "local"
    bucket = kind == "bucket"
    remote = f"{moto.target}/ranks" if bucket else str(tmp_path / "remote")
    environ = _environment(moto) if bucket else {}
    found = ranks.first(3).call(rank_tiers.saves, str(local), remote, environ, [1, 2])
    for rank, one in enumerate(found):
        own = {f"__{rank}_0.distcp"}
        assert own <= set(one["sent"])
        assert set(one["sent"]) - own <= {".metadata", "state.json"}
        assert one["compared"] == one["sent"]
        assert one["states"] == ["durable", "verified"]
        assert (one["steps"], one["latest"]) == ([1, 2], 2)
        order = ["copied", "committed", "remote"]
        assert one["told"] == [[step, event] for step in (1, 2) for event in order]
    assert sum(len(one["sent"]) for one in found) == 5
    assert sorted(path.name for path in local.glob("step-*")) == ["step-2"]
    assert [one.step for one in events(local, "verified")] == [1, 2]
    with moto.active():
        state = iobench.load_checkpoint(remote, 1, writer="s3" if bucket else "hybrid")
    assert state["epoch"] == 6
    if not bucket:
        assert rank_saves.leftovers(remote) == []

    # A node with an empty directory restores from the remote tier, at another world size.
    shutil.rmtree(local)
    found = ranks.first(2).call(rank_tiers.restores, str(local), remote, environ, "auto")
    for one in found:
        assert (one["epoch"], one["right"], one["said"]) == (7, True, [])
        assert one["sources"] == {remote: "read"}
    assert not list(local.glob("step-*"))


@pytest.mark.parametrize("mode", ["all", "all-gather"])
def test_damaged_local_files(ranks, tmp_path, mode: str) -> None:
    """A damaged piece comes from the remote tier; if a file is lost, the whole checkpoint does."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    two = ranks.first(2)
    two.call(rank_tiers.saves, str(local), str(remote), {}, [1])
    file = local / "step-1" / "__1_0.distcp"
    damage(file)
    found = two.call(rank_tiers.restores, str(local), str(remote), {}, mode)
    assert all(one["right"] and one["epoch"] == 6 for one in found)
    mended = [one for one in found if str(remote) in one["sources"]]
    assert mended
    for one in mended:
        assert "__1_0.distcp is damaged" in one["sources"][str(local)]
        assert any("in part" in text for text in one["said"])
    file.unlink()
    found = two.call(rank_tiers.restores, str(local), str(remote), {}, mode)
    for one in found:
        assert (one["right"], one["epoch"]) == (True, 6)
        assert one["sources"][str(remote)] == "read"
        assert any(f"is read from {remote}: " in text for text in one["said"])


def test_a_later_save_of_another_job_counts(ranks, tmp_path) -> None:
    """Two nodes with own local directories and one remote tier: the last save is restored."""
    local, other, remote = (tmp_path / name for name in ("local", "other", "remote"))
    two = ranks.first(2)
    two.call(rank_tiers.saves, str(local), str(remote), {}, [1])
    two.call(rank_tiers.saves, str(other), str(remote), {}, [5])
    found = two.call(rank_tiers.restores, str(local), str(remote), {}, "auto")
    assert [one["epoch"] for one in found] == [10, 10]
    assert [one["steps"] for one in found] == [[1, 5], [1, 5]]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_remote_directory_of_one_node(ranks, tmp_path) -> None:
    """It is found by rank 0, which does not see the files of rank 1; nothing is published."""
    if why := no_private_mounts():
        pytest.skip(why)
    local, remote = tmp_path / "local", tmp_path / "remote"
    remote.mkdir()
    found = ranks.first(2).call(rank_tiers.node_local, str(local), str(remote))
    for (error,) in found:
        assert "must be one directory that all nodes share" in error
    assert not list(remote.glob("step-*"))
    assert iobench.load_checkpoint(local)["w"].sum() == 3


def test_a_dead_server(ranks, moto, tmp_path) -> None:
    """Nothing waits for it, and every rank gets the error of `wait`."""
    local = tmp_path / "local"
    environ = {**_environment(moto), "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}
    two = ranks.first(2)
    two.call(rank_saves.saves, str(local), [1])  # an empty directory must ask the server
    found = two.call(rank_tiers.dead, str(local), "s3://iobench/dead", environ)
    for state, error, total, steps, _ in found:
        assert (state, total, steps) == ("durable", 3.0, [1, 10])
        assert error

    assert any("are not in s3://iobench/dead yet" in text for text in found[0][-1])
    assert iobench.load_checkpoint(local)["w"].sum() == 3


def test_a_warning_of_close_that_is_an_error(ranks, tmp_path) -> None:
    """The Checkpointer of every rank is closed all the same, and the directory is free."""
    found = ranks.first(2).call(rank_tiers.warned, str(tmp_path / "a"), str(tmp_path / "b"))
    for rank, error, is_open, steps in found:
        assert error.startswith("RankError: rank 0 (host" if rank else "RuntimeWarning: step 1")
        assert "step 1 is not copied" in error
        assert not is_open
        assert steps == [1]


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_to_the_faster_tier(ranks, moto, tmp_path, kind, iobench_inside) -> None:
    """A direct save has one copy, which every rank names; manifest and `iobench tiers` say why."""
    local, bucket = tmp_path / "local", kind == "bucket"
    remote = f"{moto.target}/placed" if bucket else str(tmp_path / "remote")
    environ = dict(moto.environment) if bucket else {}
    found = ranks.first(2).call(rank_tiers.placed, str(local), remote, environ, not bucket)
    for one in found:
        memory = [] if bucket else [["memory", "volatile"]]
        assert one["first"][-2:] == ["durable", "verified"]
        assert one["second"] == [*memory, [remote, "durable"]]
        assert (one["latest"], one["right"]) == (2, True)
        assert one["sources"] == {remote if bucket else "memory": "read"}
        assert one["third"] == str(local)
        assert (one["steps"], one["left"]) == ([1, 2, 3], [1, 3])
    assert names(local) == {"step-1", "step-3"}
    assert [one.step for one in events(local, "saved")] == [1, 3]
    direct = next(one for one in events(local, "durable") if one.step == 2)
    assert direct.size_bytes == direct.sent_bytes > 1_700_000  # of all ranks
    manifest = json.loads((local / "step-3" / "manifest.json").read_text())
    assert manifest["writer"]["placement"].startswith("local takes")
    with moto.active():
        state = iobench.load_checkpoint(remote, 3, writer="s3" if bucket else "hybrid")
    assert state["epoch"] == 8


@pytest.mark.parametrize(
    ("victim", "before"),
    [(1, False), *(pytest.param(one, True, marks=pytest.mark.exhaustive) for one in (0, 1))],
)
def test_a_direct_save_that_fails_in_one_rank(ranks, moto, tmp_path, victim, before) -> None:
    """All ranks write it to the local tier, and the copy goes on; the bucket has nothing else."""
    local, remote = tmp_path / "local", f"{moto.target}/fails-{victim}-{before}"
    call = rank_tiers.fails
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
    assert events(local, "saved")[0].step == 1
    with moto.active():
        assert iobench.load_checkpoint(remote, 1, writer="s3")["epoch"] == 6
        writer = S3Writer()
        objects = S3Objects(writer.client, S3Target.parse(remote))
        assert objects.uploads() == []
        keys = objects.keys()
        writer.client.close()
    assert not [key for key in keys if key.rsplit("/", 1)[-1].startswith("part-")]


def test_a_bucket_that_does_not_answer_one_rank(ranks, moto, tmp_path) -> None:
    """Its part of a direct save has a limit; then all ranks write to the local tier."""
    local, remote = tmp_path / "local", f"{moto.target}/late"
    found = ranks.first(2).call(rank_tiers.late, str(local), remote, dict(moto.environment))
    for one in found:
        assert (one["status"], one["copy"], one["steps"]) == ("committed", str(local), [1])
    (message,) = found[0]["said"]
    assert "rank 1" in message
    assert "not written within 500 ms" in message
    assert iobench.load_checkpoint(local)["epoch"] == 6


def test_the_local_tier_is_measured_by_all_ranks(ranks, tmp_path) -> None:
    """Each writes a part; nothing is left of it."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    found = ranks.first(3).call(rank_tiers.measures, str(local), str(remote))
    assert len(found[0]) == 2
    assert all(1_500_000 < size <= 4 << 20 for size in found[0])
    assert names(local) == set()
    assert names(remote) == {"step-1", "step-2"}


def test_not_with_replicas(ranks, tmp_path) -> None:
    """Told in each rank."""
    found = ranks.first(2).call(
        rank_tiers.placement_refused, str(tmp_path / "a"), str(tmp_path / "b")
    )
    assert all("placement: not with replicate" in text for text in found)
