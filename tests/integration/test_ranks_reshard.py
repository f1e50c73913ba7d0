"""Real ranks save and load: any world size and sharding gives the state of one process."""

import json
import os
import re
import secrets
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import iobench
from iobench.checkpoint.object_store import ObjectStore
from iobench.ranks.restore_plan import RESTORE_MODES
from iobench.writers.s3 import S3Writer
from tests.support import rank_slices, rank_states
from tests.support.rank_pool import RankPool
from tests.support.rank_states import LAYOUTS, digest, full

_SIZES = (1, 2, 3, 4)


@pytest.fixture
def pool(ranks: RankPool) -> RankPool:
    return ranks


@pytest.fixture(scope="module")
def kept() -> dict[str, Path]:
    """What the tests of this module have saved."""
    return {}


@pytest.fixture
def saved(pool: RankPool, kept: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one checkpoint per world size and layout: step 10 * size + layout."""
    if "directory" in kept:
        return kept["directory"]
    directory = tmp_path_factory.mktemp("saved")
    for size in _SIZES:
        for number, layout in enumerate(LAYOUTS[: 4 if size > 1 else 1]):
            step = 10 * size + number
            found = pool.call(rank_states.save, str(directory), step, layout, world=size)
            assert found == ["committed"] * size
    kept["directory"] = directory
    return directory


@pytest.mark.parametrize("saved_by", _SIZES)
@pytest.mark.parametrize("size", _SIZES)
def test_any_world_size(pool, saved, saved_by: int, size: int) -> None:
    """Every layout of the save, loaded in another layout and by each mode: equal by hash."""
    for number in range(4 if saved_by > 1 else 1):
        layout = LAYOUTS[(number + size) % 4]
        step = 10 * saved_by + number
        mode = RESTORE_MODES[(number + size + saved_by) % 4]
        found = pool.call(rank_states.load, str(saved), step, layout, saved_by, mode, world=size)
        assert found == [digest(full())] * size


@pytest.mark.parametrize("saved_by", _SIZES)
def test_ranks_with_different_keys(pool, tmp_path, saved_by: int) -> None:
    """Pipeline parallelism: each rank gets the layers of its own `like`, of any other split.

    A layer that no rank wants is an error in all of them.
    """
    assert pool.call(rank_states.save_stages, str(tmp_path), 1, world=saved_by)
    for size in _SIZES:
        mode = RESTORE_MODES[(saved_by + size) % 4]
        found = pool.call(rank_states.load_stages, str(tmp_path), 1, mode, world=size)
        assert all("unexpected 1 (model.layers.3.weight)" in error for _, error in found), found
        if size > 1 and mode == "all":
            data = "*.distcp" if saved_by > 1 else "*.safetensors"
            whole = sum(file.stat().st_size for file in tmp_path.glob(f"step-1/{data}"))
            assert sum(moved for moved, _ in found) < 1.5 * whole, (found, whole)


def test_views_of_one_process(pool, tmp_path) -> None:
    """A transposed weight is tied again in ranks, and cannot be sharded."""
    weight = torch.arange(60.0).reshape(6, 10)
    state = {"model": {"w": weight, "row": weight[2], "turned": weight.t()}}
    with iobench.Checkpointer(tmp_path, writer="buffered") as ckpt:
        ckpt.save(state, 1)
    for tied, error in pool.call(rank_states.load_views, str(tmp_path), world=2):
        assert tied
        assert "the bytes of model.w describe another tensor too" in error


def test_resume(pool, tmp_path) -> None:
    """One line begins a job and goes on with it, also with other ranks: module and optimizer."""
    ((_, whole), *_) = pool.call(rank_states.resumes, str(tmp_path / "whole"), 5, world=2)
    ((first, _), *_) = pool.call(rank_states.resumes, str(tmp_path / "parts"), 3, world=2)
    assert first == 0
    found = pool.call(rank_states.resumes, str(tmp_path / "parts"), 5, world=3)
    assert found == [[3, whole]] * 3


@pytest.mark.parametrize("at", [20, -1])
def test_damage_of_one_process(pool, tmp_path, at: int) -> None:
    """In the header of the file, or in a tensor: every rank refuses the checkpoint."""
    with iobench.Checkpointer(tmp_path, writer="buffered") as ckpt:
        for step in (1, 2):
            ckpt.save(rank_states.state_of(0, 1, "rows"), step)
    file = tmp_path / "step-2" / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    found = pool.call(rank_states.load_previous, str(tmp_path), world=2)
    for step, error in found:
        assert step == 1
        assert "tensors.safetensors: damaged, the checksum of " in error


@pytest.mark.parametrize(("saved_by", "number"), [(2, 0), (3, 2), (4, 1)])
def test_stock_torch_reads_it(pool, saved, tmp_path, saved_by, number) -> None:
    """`dcp.load` at another sharding, and torch's format_utils, which read every item."""
    checkpoint = saved / f"step-{10 * saved_by + number}"
    pool.call(rank_states.stock_load, str(checkpoint), "columns")
    dcp_to_torch_save(checkpoint, tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=False)
    model, expected = found["model"], full()
    assert torch.equal(model.pop("tied"), expected["w0"])
    assert digest(model) == digest(expected)
    assert found["epoch"] == 5
    assert found["optimizer"]["groups"] == [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}]
    assert torch.equal(found["optimizer"]["pair"][1], expected["vector"] + 1)
    for rank in range(saved_by):
        assert found["rng"][f"rank{rank}"]["python"] == (rank, [1, 2])
        assert found["rng"][f"rank{rank}"]["torch"].tolist() == [rank] * 4


def test_all_of_it_without_a_job(saved) -> None:
    """`load_checkpoint` in one process reads what four ranks saved, without torch's pickle."""
    state = iobench.load_checkpoint(saved, 40)
    state["model"].pop("tied")
    assert digest(state["model"]) == digest(full())
    assert [one["python"][0] for one in state["rng"].values] == [0, 1, 2, 3]
    manifest = json.loads((saved / "step-40" / "manifest.json").read_text())
    assert (manifest["format"], manifest["world_size"]) == ("dcp", 4)
    assert all(piece["xxh3_64"] for file in manifest["files"] for piece in file["pieces"])
    assert not list((saved / "step-40").glob("part-*"))


def test_in_a_bucket(pool, server) -> None:
    """The manifest object is the commit; the ranks of an earlier start write to another prefix."""
    with server.active():
        environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        bucket = f"{server.target}/run-{secrets.token_hex(4)}"
        for step in (1, 2):
            found = pool.call(rank_states.save_to_bucket, bucket, step, environ, world=2)
            assert found == [["committed", f"{step}"]] * 2
        state = iobench.load_checkpoint(bucket, writer="s3")
        state["model"].pop("tied")
        assert digest(state["model"]) == digest(full())
        store = ObjectStore(bucket, S3Writer())
        assert store.steps() == [2]  # KeepLast(1)
        assert re.fullmatch(r".*/step-2\.[0-9]+", store.locate(2))
        loaded = pool.call(rank_states.load_from_bucket, bucket, environ, world=3)
        assert loaded == [digest(full())] * 3


_HEADERS = 64 * 1024  # of torch's file format: about 1 KiB for each part


def test_stock_dcp_loads_what_ranks_saved_in_slices(ranks, tmp_path) -> None:
    """Plain tensors, DTensors replicated, sharded by rows, by columns and both, objects."""
    assert ranks.call(rank_slices.save_in_slices, str(tmp_path)) == [[]] * 4
    shares = Counter[str]()
    for file in (tmp_path / "step-1").glob("*.distcp"):
        shares[file.name.split("_")[2]] += file.stat().st_size
    assert len(shares) == 4
    mean = shares.total() / len(shares)
    # 64 KiB is the least unit of a share; this state is small, so that the test is quick.
    assert max(shares.values()) <= mean * 1.01 + 64 * 1024 + _HEADERS, shares
