"""Saves of real ranks: the same ones in all ranks, and a failure of one fails in all of them."""

import os

import pytest
import torch
from support.filesystems import no_private_mounts

import iobench
from iobench.ranks.restore_plan import RESTORE_MODES
from iobench.units import MIB
from tests.support import rank_saves
from tests.support.rank_pool import FirstRanks, RankPool
from tests.support.rank_states import digest

_HOW = ("save", "save_async")


@pytest.fixture
def pool(ranks: RankPool) -> FirstRanks:
    return ranks.first(2)


@pytest.mark.parametrize(
    ("slots", "on_full", "steps", "expected"),
    [
        (3, "wait", [1, 2, 3], ["committed", "dropped", "committed"]),
        (1, "skip", [1, 2], ["committed", "skipped"]),
        (2, "drop", [1, 2, 3], ["committed", "dropped", "committed"]),
    ],
)
def test_rank_0_decides_which_snapshot_is_written(
    pool, tmp_path, slots, on_full, steps, expected
) -> None:
    """The newest snapshot is next; all ranks write, skip and drop the same ones."""
    directory = tmp_path / "a"
    found = pool.call(rank_saves.gated, str(directory), slots, on_full, steps)
    assert found == [expected] * 2
    written = [step for step, status in zip(steps, expected, strict=True) if status == "committed"]
    for step in written:
        assert iobench.load_checkpoint(directory, step)["epoch"] == 5 + step
    assert rank_saves.leftovers(str(directory)) == []


@pytest.mark.parametrize(
    ("size", "layout", "share", "lazy", "gpu"),
    [
        *((2, "rows", 1 / 8, False, False), (4, "rows", 1 / 2, True, False)),
        *(
            (4, "mixed", 1 / 8, True, False),
            (2, "mixed", 1, False, False),
            (2, "mixed", 1, False, True),
        ),
        *((2, "rows", 1 / 2, True, True), (4, "mixed", 1 / 8, False, True)),
    ],
)
def test_a_budget_below_the_state(ranks, tmp_path, size, layout, share, lazy, gpu) -> None:
    """The files are bit for bit those of a save without a budget, of the moment of the call."""
    found = ranks.first(size).call(rank_saves.streamed, str(tmp_path), layout, share, lazy, gpu)
    assert all(one == [["committed", share < 1, True]] * 2 for one in found)
    for step in (1, 2):
        have, want = tmp_path / f"have/step-{step}", tmp_path / f"want/step-{step}"
        names = sorted(path.name for path in want.glob("*.distcp"))
        assert len(names) == size
        for name in names:
            assert (have / name).read_bytes() == (want / name).read_bytes()
        states = [iobench.load_checkpoint(one.parent, step) for one in (have, want)]
        assert digest(states[0]["model"]) == digest(states[1]["model"])


def test_a_budget_with_replicas(pool, tmp_path) -> None:
    """It may mean fewer slots. One below the state is refused: replicas are sent from a whole
    snapshot in memory."""
    for *saves, outcomes, error in pool.call(rank_saves.replicated_budget, str(tmp_path)):
        assert saves == [["committed", False, 1]] * 2
        assert outcomes == ["complete"]
        assert "the budget is 100.00 KiB" in error


def test_an_error_of_prepare_in_one_rank(pool, tmp_path) -> None:
    """It is raised in all ranks, and none waits for another: the next saves work."""
    (first, failed, steps), (own, own_failed, own_steps) = pool.call(
        rank_saves.prepared, str(tmp_path)
    )
    assert own.startswith("StateError")
    assert first.startswith("RankError: rank 1 (host")
    assert "object" in first
    assert "No space left on device" in failed
    assert "No space left on device" in own_failed
    assert steps == own_steps == [1, 3]


@pytest.mark.parametrize("what", ["pages", "thread"])
def test_a_rank_without_memory_for_a_load(pool, tmp_path, what: str) -> None:
    """The others do not wait for it. It is not damage: no other checkpoint is tried."""
    (first, threads, epoch), (own, own_threads, _) = pool.call(
        rank_saves.without_memory, str(tmp_path), what
    )
    assert own == f"MemoryError: no {what}"
    assert first.startswith("RankError: rank 1 (host")
    assert f"no {what}" in first
    assert threads == own_threads == []
    assert epoch == 5


@pytest.mark.parametrize(
    ("what", "how"),
    [
        *((what, how) for what in ("write:0", "write:1", "publish:0") for how in _HOW),
        ("slot:0", "save_async"),
        ("slot:1", "save_async"),
        ("ahead:0", "save_async"),
        ("ahead:1", "save_async"),
        ("slot:0", "streamed"),
        ("slot:1", "streamed"),
        ("middle:0", "streamed"),
        ("middle:1", "streamed"),
        ("publish:0", "streamed"),
    ],
)
def test_a_failure_fails_in_all_ranks(pool, tmp_path, what, how) -> None:
    """Every rank names the rank that failed; nothing is visible or left; the next save works."""
    found = pool.call(rank_saves.failing, str(tmp_path), what, how)
    failed = what[-1]
    for rank, (first, second, third, steps, status) in enumerate(found):
        if how == "save":
            assert f"rank {failed} (host" in first
            assert second == ""
        elif first:  # no slot: raised at once in this rank
            assert (str(rank), first) == (failed, "StateError: no memory left")
        if how != "save":
            assert f"rank {failed} (host" in second
        assert third == ""
        assert steps == []
        assert status[0] == "failed"
        assert status[-1] == "committed"
    assert rank_saves.leftovers(str(tmp_path)) == []
    assert iobench.load_checkpoint(tmp_path)["epoch"] == 5


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", "w is a tensor of torch.float32 [3] on rank 0 and a tensor of torch.float32 [4]"),
        ("value", "state['epoch'] differs between rank 0 (1) and rank 1 (2); wrap it in"),
        ("object", "state['epoch'] is a builtins.object, which a checkpoint cannot hold"),
        ("step", "step 1 is saved already"),
    ],
)
def test_states_that_do_not_fit_together(pool, tmp_path, what, message) -> None:
    """All ranks raise, with the path of the value; the next save works."""
    found = pool.call(rank_saves.refused, str(tmp_path), what)
    for error, later in found:
        assert message in error
        assert later == ""
    assert rank_saves.leftovers(str(tmp_path)) == []


def test_damage_in_the_part_of_one_rank(pool, tmp_path) -> None:
    """A flipped bit raises in all ranks, whoever reads it; "previous" restores the one before."""
    pool.call(rank_saves.saves, str(tmp_path), [1, 2])
    file = tmp_path / "step-2" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    for mode in RESTORE_MODES:
        for error, epoch, _ in pool.call(rank_saves.loads, str(tmp_path), "raise", mode):
            assert error.startswith("DataMismatchError"), error
            assert "__1_0.distcp" in error or "rank" in error
            assert epoch is None
        assert pool.call(rank_saves.loads, str(tmp_path), "previous", mode) == [["", 6, 1]] * 2
    file.unlink()
    assert pool.call(rank_saves.loads, str(tmp_path), "previous", "all") == [["", 6, 1]] * 2
    with pytest.raises(iobench.errors.DataMismatchError):
        iobench.load_checkpoint(tmp_path)


def test_loads_on_a_full_disk(pool, new_filesystem) -> None:
    """A load writes nothing, so it needs no space."""
    root = new_filesystem("tmpfs", 8 * MIB)
    found = pool.call(rank_saves.full_disk, str(root / "runs"), str(root / "filler"))
    assert found == [[6, 6]] * 2
    assert sorted(os.listdir(root / "runs")) == [".iobench-lock", "step-1"]


def test_retention_and_removal(pool, tmp_path) -> None:
    """Rank 0 removes for all; a state of another structure is planned anew."""
    for found in pool.call(rank_saves.kept, str(tmp_path)):
        steps, latest, left, then, error, seen, again, names = found
        assert (steps, latest, left, then, seen) == ([3, 4], 4, [3], 3, 4)
        assert "there is no checkpoint of step 4" in error
        assert again == [3, 4]
        assert names == ["empty", "half"]


def test_the_copy_begins_before_the_ranks_agree(pool, tmp_path) -> None:
    """If another rank then has a new structure, rank 0 copies what it writes now.

    If another rank cannot save, the save fails in all ranks, and its slot is free again.
    """
    (first, *zero), (second, *one) = pool.call(rank_saves.changing, str(tmp_path))
    assert first > 1_200_000 > 100_000 > second
    for rank, (equal, bad, again, statuses, steps) in enumerate((zero, one)):
        assert equal
        assert "state['bad'] is a builtins.object" in bad
        assert ("rank 1 (host" in bad) == (rank == 0)
        assert "step 2 is saved already" in again
        assert (statuses, steps) == (["committed"] * 3, [1, 2, 4])


def test_lazy_saves(pool, tmp_path) -> None:
    """A tensor that changes during the copy of one rank fails the save in all ranks."""
    for rank, (value, first, again, steps) in enumerate(pool.call(rank_saves.lazy, str(tmp_path))):
        assert value == 1.0
        assert "was changed during its lazy copy" in first
        assert ("rank 1 (host" in first) == (rank == 0)
        assert (again, steps) == ("", [1, 3])


def test_a_schedule_that_measures_decides_for_all(pool, tmp_path) -> None:
    first, second = pool.call(rank_saves.auto_schedule, str(tmp_path))
    assert first == second
    assert any(first)


def test_two_jobs_in_one_directory(pool, tmp_path) -> None:
    """Another job is refused, in all of its ranks, with the holder's name."""
    holder = f"process {os.getpid()} on host"
    with iobench.Checkpointer(tmp_path):
        for error in pool.call(rank_saves.opens, str(tmp_path)):
            assert "is in use" in error
            assert holder in error
    assert pool.call(rank_saves.held_lock, str(tmp_path)) == ["", ""]
    with pytest.raises(iobench.errors.TargetError, match="is in use"):
        iobench.Checkpointer(tmp_path)
    assert pool.call(rank_saves.held_lock, str(tmp_path)) == ["", ""]


def test_a_directory_of_one_node_alone(pool, tmp_path) -> None:
    """Rank 0 looks at every part, so it names the rank whose directory is another one."""
    if why := no_private_mounts():
        pytest.skip(why)
    found = pool.call(rank_saves.node_local, str(tmp_path))
    for error, left in found:
        assert "rank 1 on host" in error
        assert "does not see it; all ranks need the same directory" in error
        assert left == []


@pytest.mark.parametrize("told", [True, False])
def test_an_interrupt_in_a_save(pool, tmp_path, told: bool) -> None:
    """Ctrl-C in a rank that waits for the others, which do the save without it. No checkpoint has
    the values of two steps, also if the interrupted rank goes on to the next one."""
    directory = tmp_path / "runs"
    (first, second), (own, own_second) = pool.call(rank_saves.interrupted, str(directory), told)
    assert own == "KeyboardInterrupt: "
    if told:
        assert "rank 1 (host" in first
        assert "failed: KeyboardInterrupt" in first
        assert "failed: KeyboardInterrupt" in own_second
    else:
        assert first == ""
        assert "this rank saves step 2, rank 0 step 1" in second
    with iobench.Checkpointer(directory, world="alone") as ckpt:
        steps = ckpt.steps()
    for step in steps:
        values = iobench.load_checkpoint(directory, step)["own"].values
        assert [one.unique().tolist() for one in values] == [[step], [step]]


def test_an_exception_in_one_rank_ends_the_wait_of_the_others(pool, tmp_path) -> None:
    """`with` tells the others: they do not wait for the deadline."""
    (first,), (second,) = pool.call(rank_saves.broken_job, str(tmp_path))
    assert first.startswith("RankError: rank 1 (host")
    assert "ValueError: the trainer failed" in first
    assert second == "ValueError: the trainer failed"
    assert torch.equal(iobench.load_checkpoint(tmp_path)["w"], torch.ones(3))
