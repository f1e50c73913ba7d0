"""FSDP2 models whose ranks keep the state of their own shards: the bits of torch.optim.AdamW, with
frozen layers and gradients that only some ranks have; other numbers of ranks by a checkpoint."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from support.offload_ranks import STEPS, Job, run_job

from iobench.checkpoint.store import DirectoryStore


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_bits_of_torch(size: int, tmp_path) -> None:
    """Each shard of parameters, moments and counts, at the steps and after a restart."""
    stock = run_job("stock", size, tmp_path)
    assert stock.codes == [0] * size, stock.errors
    first = run_job("offload", size, tmp_path, steps=3)
    assert first.codes == [0] * size, first.errors
    names = [f"rank-{rank}-of-{size}" for rank in range(size)]
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == names
    second = run_job("offload", size, tmp_path)
    assert second.codes == [0] * size, second.errors
    assert second.resumed() == 3
    for expected, *found in zip(stock.digests(), first.digests(), second.digests(), strict=True):
        assert len(expected) == STEPS
        for digests in found:
            assert digests
            assert digests.items() <= expected.items()
        assert [sorted(one) for one in found] == [[2, 3], [3, 4, STEPS]]


def test_another_number_of_ranks(tmp_path) -> None:
    """A Checkpointer saves the state_dict of two ranks; four go on like torch.optim.AdamW does."""
    saved = run_job("offload-save-even", 2, tmp_path, steps=3)
    assert saved.codes == [0, 0], saved.errors
    (tmp_path / "state").rename(tmp_path / "before")
    found = [run_job(kind, 4, tmp_path) for kind in ("stock-load-even", "offload-load-even")]
    for job in found:
        assert job.codes == [0] * 4, job.errors
    for stock, offloaded in zip(*(job.digests() for job in found), strict=True):
        assert offloaded.keys() >= {3, 4}
        assert offloaded.items() <= stock.items()


def test_other_ranks_have_no_state(tmp_path) -> None:
    """Neither `resume` nor a new training takes the directory of another number of ranks."""
    assert run_job("offload", 2, tmp_path, steps=1).codes == [0, 0]
    job = run_job("offload", 4, tmp_path, steps=1)
    assert "has the state of 2 ranks; this job has 4" in job.errors[0]
    assert job.codes[0] == 1  # the others may have been killed after it
    names = [path.name for path in (tmp_path / "state").iterdir()]
    assert sorted(names) == ["rank-0-of-2", "rank-1-of-2"]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_bits_with_bfloat16(size: int, tmp_path) -> None:
    """Parameters of bfloat16, which is the default dtype too, with clipping and accumulation."""
    stock = run_job("stock-bf16", size, tmp_path)
    assert stock.codes == [0] * size, stock.errors
    for steps in (3, STEPS):
        job = run_job("offload-bf16", size, tmp_path, steps=steps)
        assert job.codes == [0] * size, job.errors
        for expected, found in zip(stock.digests(), job.digests(), strict=True):
            assert steps in found
            assert found.items() <= expected.items()


def copied(source: Path, to: Path) -> None:
    """Without the files by which the ranks of a job meet."""
    shutil.copytree(source, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".iobench*"))


class _Saved(NamedTuple):
    size: int
    base: Path
    stock: Job
    job: Job

    def go_on(self, to: Path, kind: str = "offload-ckpt") -> Job:
        """The job that goes on in a copy of the directories, with the bits of torch."""
        job = run_job(kind, self.size, to)
        assert job.codes == [0] * self.size, job.errors
        for expected, *found in zip(
            self.stock.digests(), self.job.digests(), job.digests(), strict=True
        ):
            for digests in found:
                assert digests.items() <= expected.items()
            assert found[1].keys() >= {3, 4, STEPS}
        return job

    def copy(self, to: Path) -> Path:
        copied(self.base, to)
        return to


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.exhaustive)])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Saved:
    """A job that has saved three steps by Checkpointer(offload=...), and torch's."""
    size, base = request.param, tmp_path_factory.mktemp(f"saved{request.param}")
    stock = run_job("stock", size, base)
    assert stock.codes == [0] * size, stock.errors
    job = run_job("offload-ckpt", size, base, steps=3)
    assert job.codes == [0] * size, job.errors
    return _Saved(size, base, stock, job)


@pytest.mark.parametrize("lost", [False, True])
def test_checkpoints_of_ranks(lost, saved, tmp_path) -> None:
    """All ranks go on from the files, also without what the optimizer has in its directories."""
    saved.copy(tmp_path)
    assert DirectoryStore(tmp_path / "checkpoints").manifest(3).offload is None
    if lost:
        shutil.rmtree(tmp_path / "state")
    job = saved.go_on(tmp_path)
    before = {one["before"] for lines in job.lines for one in lines if "before" in one}
    assert before == {0 if lost else 3}


def test_an_older_checkpoint(saved, tmp_path) -> None:
    """Ranks that have gone further return to it."""
    job = saved.go_on(saved.copy(tmp_path), "offload-ckpt-back")
    loaded = [one for lines in job.lines for one in lines if "loaded" in one]
    assert {(one["loaded"], one["before"]) for one in loaded} == {(3, 4)}


@pytest.mark.parametrize(
    ("size", "other"), [pytest.param(2, 4, marks=pytest.mark.exhaustive), (4, 2)]
)
def test_checkpoints_of_another_number_of_ranks(size: int, other: int, tmp_path) -> None:
    """They have the state as DTensors, under the names of torch: it goes on like torch's AdamW."""
    job = run_job("offload-ckpt-even", size, tmp_path, steps=3)
    assert job.codes == [0] * size, job.errors
    copied(tmp_path / "checkpoints", tmp_path / "copy")
    stock = run_job("stock-load-even", other, tmp_path)
    assert stock.codes == [0] * other, stock.errors
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "copy").rename(tmp_path / "checkpoints")
    found = run_job("offload-ckpt-even-other", other, tmp_path)
    assert found.codes == [0] * other, found.errors
    for expected, digests in zip(stock.digests(), found.digests(), strict=True):
        assert digests.items() <= expected.items()
        assert digests.keys() == {3, 4, STEPS}


def test_counts_that_differ_between_ranks(saved, tmp_path) -> None:
    """Another number of ranks cannot go on from moments of different ages."""
    saved.copy(tmp_path)
    job = run_job("offload-ckpt-other", 6 - saved.size, tmp_path)
    assert job.codes[0] == 1
    assert f"some of the {saved.size} ranks that saved this had no gradient" in job.errors[0]
