"""Trainings of a RankPool whose Checkpointer pins the parts of a ShardedAdamW."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

import iobench
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import DataMismatchError
from iobench.offload.rank_directories import complete_sizes, rank_directory, records_in
from iobench.offload.ranked import ShardedAdamW
from support.kill_points import arm
from tests.support.offload_training import OPTIONS, VALUES, give_gradients, make_parameters
from tests.support.rank_offload import bits
from tests.support.rank_pool import in_world, mesh_of

__all__ = ["KEPT", "PINS", "held", "named", "resumed", "save_fails", "train", "two_histories"]

PINS = 3
KEPT = 2


def _opened(
    size: int, directory: str, *, engine: str = "thread", **own: Any
) -> tuple[list[torch.Tensor], ShardedAdamW, dict[str, Any]]:
    """`own` are options of a new optimizer."""
    torch.set_num_threads(1)
    world = in_world(size)
    common: dict[str, Any] = {
        "world": world,
        "group": mesh_of(size).get_group() if size > 1 else None,
        "deadline_s": 60,
        "engine": engine,
    }
    base = Path(directory) / "state"
    # Only the directories say whether there was a training; all ranks look before one makes any.
    from iobench.dist.control import shared_control

    control = shared_control(world).sub("test")
    begun = any(
        not one.tentative  # of a load that was killed
        for n in complete_sizes(base)
        for rank in range(n)
        for one in records_in(base / rank_directory(rank, n))
    )
    assert len(set(control.all_gather("begun", begun, deadline_s=60))) == 1
    parameters = make_parameters(9 if begun else 0)
    if begun:
        optimizer = ShardedAdamW.resume(parameters, base, memory=OPTIONS["memory"], **common)
    else:
        new: dict[str, Any] = {**VALUES, **OPTIONS, "pins": PINS, **own}
        optimizer = ShardedAdamW(parameters, base, **new, **common)
    return parameters, optimizer, {"world": world, "keep": iobench.KeepLast(KEPT)}


def train(
    size: int,
    directory: str,
    steps: int,
    load: int | str | None = None,
    every: int = 1,
    kill: tuple[int, str] | None = None,
    on_corrupt: str = "raise",
) -> dict[str, Any]:
    """Train until there are `steps` updates, with a checkpoint after each `every`; first load."""
    parameters, optimizer, options = _opened(size, directory)
    rank = options["world"].rank
    if kill is not None and kill[0] == rank:
        arm(kill[1])
    begun: dict[str, Any] = {}
    with (
        optimizer,
        iobench.Checkpointer(Path(directory) / "runs", offload=optimizer, **options) as ckpt,
    ):
        if load is not None and (load != "latest" or ckpt.latest() is not None):
            which: Any = load
            how: Any = on_corrupt
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                try:
                    state = ckpt.load(which, on_corrupt=how)
                except DataMismatchError as error:
                    return {"error": str(error)}
            assert ckpt.loaded is not None
            begun = {"step": state["step"], "loaded": ckpt.loaded.step, "bits": bits(parameters)}
            begun["rank"] = state["rank"] if isinstance(state["rank"], int) else None
        start = optimizer.updates
        for step in range(start, steps):
            give_gradients(parameters, step)
            optimizer.step()
            if (step + 1) % every == 0:
                own = iobench.PerRank(rank)
                ckpt.save_async({"step": step + 1, "rank": own}, step + 1)
        ckpt.wait()
        found = ckpt.steps()
    return {
        "begun": begun,
        "start": start,
        "bits": bits(parameters),
        "steps": found,
        "groups": parameters and optimizer.param_groups[0]["lr"],
        "files": sorted(path.name for path in (Path(directory) / "state").iterdir()),
    }


def save_fails(size: int, directory: str, kill: tuple[int, str]) -> dict[str, Any]:
    """Save twice; the second save fails in a rank. Then save and load again."""
    parameters, optimizer, options = _opened(size, directory)
    errors: list[str] = []
    options["deadline_s"] = 60
    with (
        optimizer,
        iobench.Checkpointer(Path(directory) / "runs", offload=optimizer, **options) as ckpt,
    ):
        give_gradients(parameters, 0)
        optimizer.step()
        ckpt.save({"step": 1}, 1)
        if kill[0] == options["world"].rank:
            arm(kill[1])
        give_gradients(parameters, 1)
        optimizer.step()
        try:
            ckpt.save({"step": 2}, 2)
        except Exception as error:  # noqa: BLE001 -- the test compares it
            errors.append(f"{type(error).__name__}: {error}")
        steps = ckpt.steps()
        ckpt.save({"step": 2}, 2)
        state = ckpt.load()
    return {"errors": errors, "steps": steps, "state": state, "bits": bits(parameters)}


def two_histories(size: int, directory: str, kill: tuple[int, str] | None) -> None:
    """Make two checkpoints after two updates each, of two histories; then go back to the first.

    `kill` is in that load.
    """
    parameters, optimizer, options = _opened(size, directory, pins=4)
    options["keep"] = iobench.KeepLast(3)
    with (
        optimizer,
        iobench.Checkpointer(Path(directory) / "runs", offload=optimizer, **options) as ckpt,
    ):
        for update in (0, 1):
            give_gradients(parameters, update)
            optimizer.step()
            ckpt.save({"step": update + 1}, update + 1)
        ckpt.load(1)
        give_gradients(parameters, 50)  # another batch than in the first history
        optimizer.step()
        ckpt.save({"step": 12}, 12)
        if kill is not None and kill[0] == options["world"].rank:
            arm(kill[1])
        ckpt.load(2)


def resumed(size: int, directory: str) -> dict[str, Any]:
    """Resume without a Checkpointer. Return the parameters, and the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parameters, optimizer, _ = _opened(size, directory)
        with optimizer:
            found = {"bits": bits(parameters), "updates": optimizer.updates}
            give_gradients(parameters, 2)
            optimizer.step()
    return {**found, "next": bits(parameters), "said": [str(one.message) for one in said]}


def held(directory: Path, size: int) -> list[set[str]]:
    """The held pins of each rank's part."""
    found = []
    for rank in range(size):
        records = records_in(directory / "state" / rank_directory(rank, size))
        pins = records[0].pins if records else ()
        found.append({str(pin.extra) for pin in pins if pin.held})
    return found


def named(directory: Path, size: int) -> list[set[str]]:
    """The pins of each rank that the manifests of `size` ranks name."""
    store = DirectoryStore(directory / "runs")
    manifests = [store.manifest(step) for step in store.steps()] if store.directory.exists() else []
    pinned = [one.pinned for one in manifests if len(one.pinned) == size]
    return [{one[rank].pin for one in pinned} for rank in range(size)]
