"""Jobs of one rank, and what is refused with DTensors. Jobs of several: test_offload_ranks.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_training import OPTIONS, make_parameters
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import iobench
from iobench.errors import OptionError, RankError, StateError, TargetError, UsageError
from iobench.offload import AdamW
from iobench.offload.parameters import ShardRanks, local_part


@pytest.fixture
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A job of one rank."""
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=0, world_size=1
    )
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def _sharded(mesh: Any, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)]))


def test_refused_with_shards(mesh: Any, tmp_path: Path) -> None:
    """Updates during backward, which FSDP2 changes later, and pins for a Checkpointer."""
    parameter = _sharded(mesh, 4, 3)
    with pytest.raises(OptionError, match="overlap=True: not with DTensors"):
        AdamW([parameter], tmp_path / "a", **OPTIONS, overlap=True)
    with AdamW([parameter], tmp_path / "b", **OPTIONS) as optimizer:
        assert [path.name for path in (tmp_path / "b").iterdir()] == ["rank-0-of-1"]
        with pytest.raises(OptionError, match=r"save optimizer\.state_dict\(\)"):
            iobench.Checkpointer(tmp_path / "c", keep=iobench.KeepLast(1), offload=optimizer)
    assert not (tmp_path / "c").exists()


def test_a_gradient_with_another_sharding(mesh: Any, tmp_path: Path) -> None:
    """Its local part has other elements: an error before anything is updated."""
    parameter = _sharded(mesh, 4, 3)
    with AdamW([parameter], tmp_path, **OPTIONS) as optimizer:
        parameter.grad = _sharded(mesh, 4, 3).detach()
        optimizer.step()
        wrong = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], shape=(4, 3), stride=(3, 1))
        parameter.grad = wrong
        with pytest.raises(UsageError, match="of the same shape and sharding"):
            optimizer.step()
        assert optimizer.updates == 1


def test_the_state_is_of_dtensors(mesh: Any, tmp_path: Path) -> None:
    """state_dict has the sharding of the parameter; load_state_dict takes that or whole tensors."""
    parameter = _sharded(mesh, 4, 3)
    with AdamW([parameter], tmp_path, **OPTIONS) as optimizer:
        parameter.grad = _sharded(mesh, 4, 3).detach()
        optimizer.step()
        found = optimizer.state_dict()
        average = found["state"][0]["exp_avg"]
        assert isinstance(average, DTensor)
        assert average.placements == parameter.placements
        found["state"][0]["exp_avg"] = torch.full((4, 3), 2.0)
        optimizer.load_state_dict(found)
        again = optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(again.to_local(), torch.full((4, 3), 2.0))
        found["state"][0]["exp_avg"] = distribute_tensor(torch.ones(4, 3), mesh, [Replicate()])
        with pytest.raises(StateError, match="load it like that"):
            optimizer.load_state_dict(found)
        found["state"][0]["exp_avg"] = torch.ones(3, 4)
        with pytest.raises(StateError, match=r"the parameter has \[4, 3\]"):
            optimizer.load_state_dict(found)


class _TwoRanks(ShardRanks):
    """This rank, and one that answers."""

    def __init__(self, other: Any) -> None:
        super().__init__(make_parameters())
        self.size, self.other = 2, other

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


def test_directories_of_other_numbers_of_ranks(mesh: Any, tmp_path: Path) -> None:
    """An error for a resume and for a new training; other names do not matter."""
    (tmp_path / "rank-notes-of-mine").mkdir()
    ranks = ShardRanks([_sharded(mesh, 4, 3)])
    assert ranks.directory(tmp_path).name == "rank-0-of-1"
    (tmp_path / "rank-1-of-2").mkdir()
    with pytest.raises(TargetError, match="has the state of 2 ranks; this job has 1"):
        ranks.directory(tmp_path)


def test_an_error_of_another_rank() -> None:
    """All raise: this rank names the other one."""
    assert _TwoRanks(None).each(lambda: 7) == 7
    with pytest.raises(RankError, match="rank 1: no space") as caught:
        _TwoRanks("no space").each(lambda: 7)
    assert caught.value.ranks == (1,)
    with pytest.raises(ZeroDivisionError):
        _TwoRanks("no space").each(lambda: 1 // 0)


def test_what_all_ranks_offer() -> None:
    """In the order of the first rank; a pin counts where all have it with the same step."""
    ranks = _TwoRanks({"b": 4, "c": None, "a": 2})
    assert list(ranks.common({"d": 9, "a": None, "b": 4}).items()) == [("a", None), ("b", 4)]


def test_the_part_of_a_whole_tensor(mesh: Any) -> None:
    """`step` and parameters that are not sharded pass through."""
    whole = torch.arange(12.0).view(4, 3)
    assert local_part(7, whole) == 7
    assert local_part(whole, whole) is whole
    parameter = _sharded(mesh, 4, 3)
    assert torch.equal(local_part(whole, parameter), whole)
    assert local_part(torch.tensor(3.0), parameter) == 3
