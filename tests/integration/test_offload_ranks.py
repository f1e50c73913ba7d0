"""FSDP2 models whose ranks keep the state of their own shards: the bits of torch.optim.AdamW, with
frozen layers and gradients that only some ranks have; other numbers of ranks by a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.offload_ranks import STEPS, run_job


@pytest.mark.parametrize("size", [2, 4])
def test_bits_of_torch(size: int, tmp_path: Path) -> None:
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


def test_another_number_of_ranks(tmp_path: Path) -> None:
    """A Checkpointer saves the state_dict of two ranks; four go on like torch.optim.AdamW does."""
    saved = run_job("offload-save", 2, tmp_path, steps=3)
    assert saved.codes == [0, 0], saved.errors
    (tmp_path / "state").rename(tmp_path / "before")
    found = [run_job(kind, 4, tmp_path) for kind in ("stock-load", "offload-load")]
    for job in found:
        assert job.codes == [0] * 4, job.errors
    for stock, offloaded in zip(*(job.digests() for job in found), strict=True):
        assert offloaded.keys() >= {3, 4}
        assert offloaded.items() <= stock.items()


def test_other_ranks_have_no_state(tmp_path: Path) -> None:
    """Neither `resume` nor a new training takes the directory of another number of ranks."""
    assert run_job("offload", 2, tmp_path, steps=1).codes == [0, 0]
    job = run_job("offload", 4, tmp_path, steps=1)
    assert "has the state of 2 ranks; this job has 4" in job.errors[0]
    assert job.codes[0] == 1  # the others may have been killed after it
    names = [path.name for path in (tmp_path / "state").iterdir()]
    assert sorted(names) == ["rank-0-of-2", "rank-1-of-2"]
