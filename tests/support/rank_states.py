"""What the ranks of a RankPool do with states and checkpoints: functions that they call by name."""

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import iobench
from iobench.errors import StateError
from tests.support.rank_pool import in_world, mesh_of

LAYOUTS = ("rows", "columns", "mixed", "replicated")


def full(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the tensors of a model: uneven ones, a scalar, one without elements."""
    random = torch.Generator().manual_seed(seed)
    return {
        "w0": torch.randn(7, 5, generator=random),
        "w1": torch.randn(6, 9, generator=random),
        "one": torch.randn(1, 3, generator=random),
        "vector": torch.randn(5, generator=random),
        "large": torch.randn(700, 600, generator=random),
        "half": torch.randn(4, 4, generator=random).bfloat16(),
        "scalar": torch.randn((), generator=random),
        "empty": torch.empty(0, 4),
    }


def _placement(layout: str, number: int, dims: int) -> Any:
    if layout == "replicated" or not dims:
        return Replicate()
    if layout == "mixed":
        return [Shard(0), Shard(dims - 1), Replicate()][number % 3]
    return Shard(dims - 1 if layout == "columns" else 0)


def sharded(tensors: dict[str, torch.Tensor], layout: str, size: int) -> dict[str, Any]:
    """Return DTensors of `tensors` on the first `size` ranks, without a collective."""
    made = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        placement = _placement(layout, number, tensor.ndim)
        local, mesh = tensor.clone(), mesh_of(size)
        if isinstance(placement, Shard):
            parts = torch.chunk(tensor, size, placement.dim)
            rank = mesh.get_local_rank()
            gone = tensor.narrow(placement.dim, 0, 0)
            local = parts[rank].clone() if rank < len(parts) else gone.clone()
        made[name] = DTensor.from_local(
            local, mesh, [placement], shape=tensor.shape, stride=tensor.stride(), run_check=False
        )
    return made


def state_of(rank: int, size: int, layout: str, seed: int = 0) -> dict[str, Any]:
    """Return a state with tensors, tied weights, plain values and values of this rank."""
    tensors = full(seed)
    model = sharded(tensors, layout, size) if size > 1 else dict(tensors)
    return {
        "model": {**model, "tied": model["w0"]},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "moment": tensors["w1"] * 2}},
            "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}],
            "pair": (1, tensors["vector"] + 1),
        },
        "rng": iobench.PerRank({"torch": torch.full((4,), rank), "python": (rank, [1, 2])}),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "epoch": 5 + seed,
    }


def digest(tensors: dict[str, Any]) -> str:
    """Return a hash of the bytes, dtypes and shapes of tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save(size: int, directory: str, step: int, layout: str) -> str:
    """Save a state from `size` ranks; return the status of the save."""
    world = in_world(size)
    with iobench.Checkpointer(directory, world=world, deadline_s=60) as ckpt:
        return str(ckpt.save(state_of(world.rank, size, layout), step).status)


def load(size: int, directory: str, step: int, layout: str, saved_by: int, mode: Any) -> str:
    """Load a step twice: whole, by this mode, and like a state of this layout. Return a hash of the
    model."""
    world = in_world(size)
    like = state_of(world.rank, size, layout, seed=1)
    with iobench.Checkpointer(directory, world=world, deadline_s=60) as ckpt:
        whole = ckpt.load(step, restore_mode=mode)
        parts = ckpt.load(step, like=like)
    _check(whole, world.rank, size, saved_by)
    _check({**parts, "model": whole["model"]}, world.rank, size, saved_by)
    if size > 1:
        for name, expected in state_of(world.rank, size, layout)["model"].items():
            found = parts["model"][name]
            assert found.placements == expected.placements, name
            assert torch.equal(found.to_local(), expected.to_local()), name
    assert parts["model"]["tied"] is parts["model"]["w0"]
    whole["model"].pop("tied")
    return digest(whole["model"])


def load_views(size: int, directory: str) -> tuple[bool, str]:
    """Load a weight and its transpose, in full and like a DTensor: whether tied, and the error."""
    with iobench.Checkpointer(directory, world=in_world(size), deadline_s=60) as ckpt:
        full_ones = ckpt.load()["model"]
        like = sharded({"w": torch.zeros(6, 10)}, "rows", size)
        plain = {"row": torch.zeros(10), "turned": torch.zeros(10, 6)}
        with pytest.raises(StateError) as caught:
            ckpt.load(like={"model": {**like, **plain}})
    full_ones["w"][2, 3] += 1
    weight = torch.arange(60.0).reshape(6, 10)
    tied = full_ones["row"][3] + 1 == weight[2, 3] + 1 == full_ones["turned"][3, 2]
    return bool(tied), str(caught.value)


class _Module(torch.nn.Module):
    """A module with one DTensor, sharded over the ranks."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        whole = sharded({"w": full(seed)["w1"]}, "rows", size)["w"]
        self.w = torch.nn.Parameter(whole)


def resumes(size: int, directory: str, until: int) -> list[Any]:
    """Train to step `until` as a script that is started again; return where it began.

    Also digests of the weight and of the optimizer's moments.
    """
    module, extra = _Module(size, 0), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    objects = {"module": module, "extra": extra, "optimizer": optimizer}
    with iobench.Checkpointer(directory, world=in_world(size), deadline_s=60) as ckpt:
        first = ckpt.resume(objects)
        for step in range(first, until):
            module.w.grad = sharded({"w": full(step)["w1"]}, "rows", size)["w"]
            optimizer.step()
            ckpt.save_async({name: one.state_dict() for name, one in objects.items()}, step)
    values = optimizer.state[module.w]
    moments = {name: values[name].full_tensor() for name in ("exp_avg", "exp_avg_sq")}
    assert values["exp_avg"].to_local().shape == module.w.to_local().shape
    whole = {"w": module.w.detach().full_tensor(), **moments, "step": values["step"]}
    return [first, digest(whole)]


def load_previous(size: int, directory: str) -> list[Any]:
    """Load the newest checkpoint without damage; return its step and what is wrong with others."""
    with iobench.Checkpointer(directory, world=in_world(size), deadline_s=60) as ckpt:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            ckpt.load(on_corrupt="previous")
        return [ckpt.loaded.step, " ".join(ckpt.loaded.passed_over.values())]


_LAYERS = 6


def _stage(rank: int, size: int) -> dict[str, Any]:
    """Return the state of one rank of pipeline parallelism: it has some of the layers."""
    own = [layer for layer in range(_LAYERS) if layer * size // _LAYERS == rank]
    # The large one is read into its own memory.
    tensors = {n: torch.randn(600 if n == 3 else 5, 600 + n, generator=_seeded(n)) for n in own}
    return {
        "model": {f"layers.{n}": {"weight": tensor} for n, tensor in tensors.items()}
        | {"norm": torch.ones(7)},
        "optimizer": {
            "state": {n: {"step": n, "moment": tensor * 2} for n, tensor in tensors.items()},
            "lr": 0.1,
        },
        **{f"array{n}": np.full(3, n) for n in own},
        "epoch": 5,
    }


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def save_stages(size: int, directory: str, step: int) -> str:
    """Save the state of `size` ranks that have different layers; return the status."""
    world = in_world(size)
    with iobench.Checkpointer(directory, world=world, deadline_s=60) as ckpt:
        return str(ckpt.save(_stage(world.rank, size), step).status)


def load_stages(size: int, directory: str, step: int, mode: str) -> list[Any]:
    """Load it into `size` ranks that have other layers. Return what was read, and an error.

    The error is that of a load in which no rank wants one of the layers.
    """
    world = in_world(size)
    expected = _stage(world.rank, size)
    with iobench.Checkpointer(directory, world=world, deadline_s=60) as ckpt:
        found = ckpt.load(step, like=_stage(world.rank, size), restore_mode=mode)
        moved = ckpt.loaded.transfer.bytes
        assert _same(found, expected), (found, expected)
        less = _stage(world.rank, size)
        less["model"].pop("layers.3", None)
        error = ""
        try:
            ckpt.load(step, like=less)
        except iobench.errors.IobenchError as failure:
            error = str(failure)
    return [moved, error]


def _same(one: Any, other: Any) -> bool:
    """Whether two states are equal, also in the types and the order of their parts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _check(state: dict[str, Any], rank: int, size: int, saved_by: int) -> None:
    """Compare everything but the model."""
    expected = state_of(rank, 1, "rows")
    assert list(state) == list(expected)
    moment = state["optimizer"]["state"][0]
    assert torch.equal(moment["moment"], expected["optimizer"]["state"][0]["moment"])
    assert moment["step"] == 3.0
    assert state["optimizer"]["groups"] == expected["optimizer"]["groups"]
    assert type(state["optimizer"]["pair"]) is tuple
    assert torch.equal(state["optimizer"]["pair"][1], full()["vector"] + 1)
    assert state["epoch"] == 5
    assert np.array_equal(state["array"], expected["array"])
    assert state["array"].dtype == np.int16
    own = state["rng"]
    if size == saved_by:
        values = {rank: own}
    else:
        assert isinstance(own, iobench.SavedPerRank)
        assert len(own.values) == saved_by
        values = dict(enumerate(own.values))
    for number, value in values.items():
        assert value["torch"].tolist() == [number] * 4
        assert value["python"] == (number, [1, 2])


def stock_load(size: int, directory: str, layout: str) -> None:
    """Let stock `dcp.load` read a checkpoint into another sharding."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    world = in_world(size)
    state = {"model": sharded(full(1), layout, size), "epoch": 0}
    dcp.load(state, checkpoint_id=Path(directory), process_group=dist.group.WORLD)
    for name, expected in sharded(full(), layout, size).items():
        assert torch.equal(state["model"][name].to_local(), expected.to_local()), name
    assert state["epoch"] == 5
    assert world.size == dist.get_world_size()


def save_to_bucket(size: int, bucket: str, step: int, environ: dict[str, str]) -> list[str]:
    """Save a state in the background to a bucket; return the status and the step found there."""
    os.environ.update(environ)
    world = in_world(size)
    options = {"writer": "s3", "keep": iobench.KeepLast(1), "deadline_s": 60}
    with iobench.Checkpointer(bucket, world=world, **options) as ckpt:
        made = ckpt.save_async(state_of(world.rank, size, "rows"), step)
        ckpt.wait()
        return [str(made.status), str(ckpt.latest())]


def load_from_bucket(size: int, bucket: str, environ: dict[str, str]) -> str:
    """Load the newest state of a bucket; return the hash of its model."""
    os.environ.update(environ)
    with iobench.Checkpointer(bucket, world=in_world(size), writer="s3", deadline_s=60) as ckpt:
        model = ckpt.load()["model"]
    model.pop("tied")
    return digest(model)
