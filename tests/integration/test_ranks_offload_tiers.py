"""A ShardedAdamW of real ranks with a remote tier: each rank copies its own part, and any number of
ranks goes on from the copies on a machine that has neither checkpoints nor optimizer files."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.offload_training import (
    OPTIONS,
    VALUES,
    assert_equal,
    give_gradients,
    make_parameters,
    snapshot,
    stock_snapshots,
)
from support.tiers import damage, events

import iobench
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import UsageError
from iobench.offload import AdamW
from iobench.offload.rank_directories import rank_directory
from iobench.testing import LocalS3
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target
from tests.support import rank_offload
from tests.support import rank_offload_tiers as job
from tests.support.rank_offload_checkpoints import held, named
from tests.support.rank_pool import PoolError, RankPool

_STEPS = 6
_HELD = "iobench.offload.held_pins.HeldPins"


@pytest.fixture(scope="module")
def snapshots() -> list[list[dict[str, Any]]]:
    """The state after each step of the stock training in one process."""
    return stock_snapshots(_STEPS)


@pytest.fixture(scope="module")
def expected(snapshots: list) -> list[list[list[int]]]:
    """The bytes of the parameters after each step."""
    return [rank_offload.bits(one["model"] for one in each) for each in snapshots]


@pytest.fixture(params=["directory", "bucket"])
def remote(
    request: pytest.FixtureRequest, server: LocalS3, tmp_path: Path
) -> Iterator[tuple[str, dict[str, str]]]:
    """A remote tier in a directory, and in a bucket of a real server process; its environment."""
    if request.param == "directory":
        yield str(tmp_path / "remote"), {}
        return
    with server.active():
        yield f"{server.target}/run-{secrets.token_hex(4)}", dict(server.environment)


def _kept(base: Path, remote: str, size: int, steps: list[int]) -> None:
    """The retention of each tier is its own, no pin is left over, and nothing else is left."""
    assert DirectoryStore(base / "runs").steps() == steps
    assert held(base, size) == named(base, size)
    assert not [one.name for one in (base / "runs").iterdir() if one.name.startswith(".step-")]
    if remote.startswith("s3"):
        writer = S3Writer()
        assert S3Objects(writer.client, S3Target.parse(remote)).uploads() == []
        writer.client.close()
        return
    assert job.assert_whole(Path(remote))


def test_other_machines_and_other_numbers_of_ranks(
    ranks: RankPool, tmp_path: Path, remote: tuple[str, dict[str, str]], expected: list
) -> None:
    """3 ranks save, 2 go on with nothing but the copies, then 1, then 3 again: always the bits of
    one process that was never interrupted."""
    where, environ = remote
    first = ranks.first(3).call(job.train, str(tmp_path / "a"), where, environ, 3)
    for rank, one in enumerate(first):
        assert one["bits"] == expected[2]
        assert one["steps"] == [1, 2, 3]
        assert one["sent"] == [f"optimizer-state-{rank}"]
        assert one["said"] == []
    _kept(tmp_path / "a", where, 3, [2, 3])
    shutil.rmtree(tmp_path / "a")
    for size, base, done in ((2, "b", 3), (1, "c", 4), (3, "d", 5)):
        found = ranks.first(size).call(
            job.train, str(tmp_path / base), where, environ, done + 1, "latest"
        )
        for one in found:
            assert one["begun"]["bits"] == expected[done - 1]
            assert (one["begun"]["lr"], one["begun"]["durable"]) == (VALUES["lr"], done)
            assert one["bits"] == expected[done]
        (told,) = found[0]["said"]
        assert f"step {done}: the optimizer is read from {where}" in told
        assert all(one["said"] == [] for one in found[1:])
        assert not (tmp_path / base / "state" / "ranks.json").exists()
        _kept(tmp_path / base, where, size, [done + 1])
        shutil.rmtree(tmp_path / base)


def test_an_optimizer_of_one_process_goes_on(
    ranks: RankPool, tmp_path: Path, snapshots: list
) -> None:
    """AdamW reads what two ranks have saved, and two ranks read what it has saved."""
    there, base = str(tmp_path / "remote"), tmp_path / "a"
    ranks.first(2).call(job.train, str(base), there, {}, 2)
    job.lose(base)
    parameters = make_parameters(9)
    with (
        AdamW(parameters, base / "one", **OPTIONS, pins=3) as optimizer,
        iobench.Checkpointer(
            base / "runs",
            keep=iobench.KeepLast(2),
            offload=optimizer,
            tiers=[iobench.Remote(there)],
        ) as ckpt,
    ):
        with pytest.warns(RuntimeWarning, match="step 2: the optimizer is read from"):
            assert ckpt.load() == {"step": 2}
        assert_equal(snapshot(optimizer), snapshots[1])
        give_gradients(parameters, 2)
        optimizer.step()
        ckpt.save({"step": 3}, 3)
        ckpt.wait(until="remote")
    with pytest.raises(UsageError, match="has its optimizer in"):
        iobench.load_checkpoint(there, 2)
    shutil.rmtree(base)
    found = ranks.first(2).call(job.train, str(base), there, {}, 4, "latest")
    wanted = [rank_offload.bits(one["model"] for one in snapshots[n]) for n in (2, 3)]
    for one in found:
        assert [one["begun"]["bits"], one["bits"]] == wanted


def test_the_part_of_one_rank_is_lost(ranks: RankPool, tmp_path: Path, expected: list) -> None:
    """The checkpoints name pins that are gone or damaged: all ranks read the copies. A damaged copy
    is found by one rank and is an error of all, or the one before is taken."""
    there, two = tmp_path / "remote", ranks.first(2)
    arguments: list[Any] = [str(tmp_path), str(there), {}]
    two.call(job.train, *arguments, 3)
    (pin,) = held(tmp_path, 2)[1] & {
        DirectoryStore(tmp_path / "runs").manifest(2).pinned[1].pin,
    }
    (tmp_path / "state" / rank_directory(1, 2) / f"extra-{pin}").write_bytes(b"damaged")
    found = two.call(job.train, *arguments, 4, 2)
    assert [one["begun"]["bits"] for one in found] == [expected[1]] * 2
    assert [one["bits"] for one in found] == [expected[3]] * 2
    assert "found by rank 1" in found[0]["said"][0]
    shutil.rmtree(tmp_path / "state")
    damage(there / "step-4" / "optimizer-state-1")
    for one in two.call(job.train, *arguments, 5, 4):
        assert "differs from its checksum" in one["error"]
    found = two.call(job.train, *arguments, 5, "latest", None, {"on_corrupt": "previous"})
    assert [one["begun"]["bits"] for one in found] == [expected[2]] * 2
    assert [one["bits"] for one in found] == [expected[4]] * 2


def test_copies_that_another_number_of_ranks_left_to_do(
    ranks: RankPool, tmp_path: Path, expected: list
) -> None:
    """The remote tier fails while 3 ranks save: pins are not held for it for ever. 2 ranks go on
    later, and copy the parts of the 3."""
    there, three = tmp_path / "remote", ranks.first(3)
    three.call(job.train, str(tmp_path), str(there), {}, 1)
    shutil.rmtree(there)
    there.write_text("a file in the way")
    told = three.call(job.block, str(tmp_path), str(there), 5)
    assert any("the optimizer has no pin left" in text for text in told[0])
    there.unlink()
    found = ranks.first(2).call(job.train, str(tmp_path), str(there), {}, 6, "latest")
    assert [one["begun"]["bits"] for one in found] == [expected[4]] * 2
    copied = {one.step: one.world_size for one in job.assert_whole(there)}
    assert (copied[5], copied[6]) == (3, 2)
    sent = [name for one in found for name in one["sent"]]
    assert set(sent) == {f"optimizer-state-{rank}" for rank in range(3)}
    assert held(tmp_path, 2) == named(tmp_path, 2)


def test_saves_wait_for_copies_when_no_pin_is_left(ranks: RankPool, tmp_path: Path) -> None:
    """A slow remote tier: each save waits for a pin in all ranks, and all are copied."""
    more = {"bandwidth_limit": "1MiB", "every_save": True, "wait": False, "keep": 1}
    arguments = [str(tmp_path), str(tmp_path / "remote"), {}, 6, None, None, more]
    found = ranks.first(2).call(job.train, *arguments)
    assert all(one["steps"][-3:] == [4, 5, 6] for one in found)
    assert [one.step for one in events(tmp_path / "runs", "durable")] == [1, 2, 3, 4, 5, 6]
    assert [one.step for one in job.assert_whole(tmp_path / "remote")] == [4, 5, 6]


def test_what_does_not_fit(ranks: RankPool, tmp_path: Path) -> None:
    """One error in every rank, and nothing of it counts."""
    there, two = str(tmp_path / "remote"), ranks.first(2)
    two.call(job.train, str(tmp_path / "a"), there, {}, 1)
    errors = two.call(job.wrong_model, str(tmp_path / "b"), there)
    assert any("the range of this rank" in one for one in errors)
    assert all(errors)
    for one in two.call(job.refused, str(tmp_path / "c"), there):
        memory, placement, warm = one
        assert "takes tiers=" in memory
        assert "not with placement" in placement
        assert "warm" in warm


def _killed(size: int, *arguments: object) -> None:
    ranks = RankPool(size)
    try:
        with pytest.raises(PoolError, match="the rank ended"):
            ranks.call(job.train, *arguments)
    finally:
        ranks.kill()


@pytest.mark.parametrize(
    ("rank", "point"),
    [
        (1, "iobench.offload.exported.SlotsFile.read:before:2"),
        (0, "iobench.dist.drain.rank_copier.RankCopier._together:after:3"),  # all is there
    ],
)
def test_killed_while_it_is_copied(
    ranks: RankPool, tmp_path: Path, expected: list, rank: int, point: str
) -> None:
    """Nothing of the second checkpoint is visible there; the next start sends what is missing, and
    what it restores elsewhere has the bits of a training without a kill."""
    there, base = tmp_path / "remote", tmp_path / "a"
    _killed(2, str(base), str(there), {}, 2, None, [rank, point])
    assert [one.step for one in job.assert_whole(there, unfinished=True)] == [1]
    first = ranks.first(2).call(job.train, str(base), str(there), {}, 3, "latest")
    assert [one["begun"]["bits"] for one in first] == [expected[1]] * 2
    assert [one["bits"] for one in first] == [expected[2]] * 2
    assert [one.step for one in job.assert_whole(there)] == [1, 2, 3]
    _kept(base, str(there), 2, [2, 3])
    size = sum(file.size_bytes for one in job.assert_whole(there)[1:2] for file in one.remote_files)
    (sent,) = (one.sent_bytes for one in events(base / "runs", "durable") if one.step == 2)
    assert sent == 0 if "_together" in point else 0 < sent <= size
    job.lose(base)
    found = ranks.first(3).call(job.train, str(base), str(there), {}, 4, 2)
    assert [one["begun"]["bits"] for one in found] == [expected[1]] * 3
    assert [one["bits"] for one in found] == [expected[3]] * 3


@pytest.mark.parametrize(
    ("point", "fresh"),
    [
        (f"{_HELD}.replace:before", True),  # rank 0 has all of its part
        (f"{_HELD}.replace:before", False),
        (f"{_HELD}.confirm:before", False),  # both have, and rank 0 says that it counts
    ],
)
def test_killed_while_it_is_restored(
    ranks: RankPool, tmp_path: Path, expected: list, point: str, fresh: bool
) -> None:
    """All ranks have what was there before, or all of the copy: in a new directory, and in one
    that a training has used."""
    there, base = str(tmp_path / "remote"), str(tmp_path / "b")
    ranks.first(3).call(job.train, str(tmp_path / "a"), there, {}, 1)
    if not fresh:
        ranks.first(2).call(job.train, base, str(tmp_path / "own"), {}, 3)
        shutil.rmtree(tmp_path / "b" / "runs")
    _killed(2, base, there, {}, 1, 1, [1, point])
    found = ranks.first(2).call(job.train, base, there, {}, 2, 1)
    if not fresh:
        before = expected[0] if "confirm" in point else expected[2]
        assert [one["resumed"] for one in found] == [before] * 2
    assert [one["begun"]["bits"] for one in found] == [expected[0]] * 2
    assert [one["bits"] for one in found] == [expected[1]] * 2
