"""Trainings of a RankPool with a ShardedAdamW whose checkpoints are copied to a remote tier."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import xxhash

import iobench
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.store import DirectoryStore
from iobench.dist.world import World
from iobench.errors import (
    DataMismatchError,
    OptionError,
    RankError,
    StateMismatchError,
    UsageError,
)
from iobench.offload.ranked import ShardedAdamW
from iobench.offload.sharded_pins import ShardedPins
from support.kill_points import arm
from support.offload_training import OPTIONS, VALUES, give_gradients, make_parameters
from support.tiers import settled
from tests.support.rank_offload import bits
from tests.support.rank_offload_checkpoints import _opened
from tests.support.rank_pool import in_world, mesh_of

__all__ = ["assert_whole", "block", "lose", "refused", "train", "wrong_model"]


@contextlib.contextmanager
def _opened_files() -> Iterator[list[str]]:
    """The files of the optimizer that this rank reads for the remote tier."""
    names: list[str] = []
    original = ShardedPins.open_file

    def open_file(self: ShardedPins, pinned: Any, record: Any) -> Any:
        names.append(record.path)
        return original(self, pinned, record)

    with mock.patch.object(ShardedPins, "open_file", open_file):
        yield names


def _read_back(ckpt: Any) -> None:
    """Wait until all copies are read back, or settled in another way."""
    ckpt.wait(until="remote")
    if ckpt._tier is not None:  # rank 0
        until_s = time.monotonic() + 30
        while not settled(ckpt):
            assert time.monotonic() < until_s
            time.sleep(0.01)


def train(
    size: int,
    directory: str,
    remote: str,
    environ: dict[str, str],
    steps: int,
    load: int | str | None = None,
    kill: tuple[int, str] | None = None,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Load, then train until there are `steps` updates; save each, and wait until it is copied.

    `more` has options: `on_corrupt`, those of the optimizer, those of `Remote`, `keep`, and `wait`:
    False to save without a wait.
    """
    own = dict(more or {})
    on_corrupt, wait = own.pop("on_corrupt", "raise"), own.pop("wait", True)
    keep = own.pop("keep", 2)
    limits = {name: own.pop(name) for name in ("bandwidth_limit", "every_save") if name in own}
    kept = iobench.KeepLast(own.pop("keep_remote", 3))
    with (
        mock.patch.dict(os.environ, environ),
        warnings.catch_warnings(record=True) as said,
        _opened_files() as names,
    ):
        warnings.simplefilter("always")
        parameters, optimizer, options = _opened(size, directory, **own)
        if kill is not None and kill[0] == options["world"].rank:
            arm(kill[1])
        options |= {"tiers": [iobench.Remote(remote, keep=kept, **limits)], "deadline_s": 60}
        options["keep"] = iobench.KeepLast(keep)
        begun: dict[str, Any] = {}
        with (
            optimizer,
            iobench.Checkpointer(Path(directory) / "runs", offload=optimizer, **options) as ckpt,
        ):
            resumed = bits(parameters)
            if load is not None and (load != "latest" or ckpt.latest() is not None):
                wanted: Any = load
                try:
                    state = ckpt.load(wanted, on_corrupt=on_corrupt)
                except DataMismatchError as error:
                    return {"error": str(error)}
                begun = {"step": state["step"], "bits": bits(parameters)}
                begun["lr"] = optimizer.param_groups[0]["lr"]
                begun["durable"] = optimizer.durable()
            for step in range(optimizer.updates, steps):
                give_gradients(parameters, step)
                optimizer.step()
                ckpt.save_async({"step": step + 1}, step + 1)
                if wait:
                    _read_back(ckpt)
            _read_back(ckpt)
            found = ckpt.steps()
        return {
            "begun": begun,
            "resumed": resumed,
            "bits": bits(parameters),
            "steps": found,
            "sent": sorted(set(names)),
            "said": [str(one.message) for one in said if one.category is RuntimeWarning],
        }


def block(size: int, directory: str, remote: str, steps: int) -> list[str]:
    """Save each step while the remote tier fails; return the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parameters, optimizer, options = _opened(size, directory)
        options |= {"tiers": [iobench.Remote(remote)], "deadline_s": 60}
        options["keep"] = iobench.KeepLast(1)
        with (
            optimizer,
            iobench.Checkpointer(Path(directory) / "runs", offload=optimizer, **options) as ckpt,
        ):
            for step in range(optimizer.updates, steps):
                give_gradients(parameters, step)
                optimizer.step()
                ckpt.save_async({"step": step + 1}, step + 1)
            ckpt.wait()
    return [str(one.message) for one in said if one.category is RuntimeWarning]


def wrong_model(size: int, directory: str, remote: str) -> str:
    """Load the state of another model; return the error."""
    world: World = in_world(size)
    parameters = make_parameters()[:3]
    optimizer = ShardedAdamW(
        parameters,
        Path(directory) / "state",
        **VALUES,
        **OPTIONS,
        pins=3,
        world=world,
        group=mesh_of(size).get_group(),
        deadline_s=60,
    )
    with (
        optimizer,
        iobench.Checkpointer(
            Path(directory) / "runs",
            offload=optimizer,
            world=world,
            keep=iobench.KeepLast(2),
            tiers=[iobench.Remote(remote)],
        ) as ckpt,
    ):
        try:
            ckpt.load()
        except (StateMismatchError, RankError) as error:
            return str(error)
    return ""


def refused(size: int, directory: str, remote: str) -> list[str]:
    """What does not go together with the copies."""
    _, optimizer, options = _opened(size, directory)
    tier, runs = iobench.Remote(remote), Path(directory) / "runs"
    found = []
    with optimizer:
        for wrong in (
            {"tiers": [iobench.Memory("1MiB"), tier]},
            {"tiers": [tier], "placement": iobench.Placement()},
        ):
            try:
                iobench.Checkpointer(runs, offload=optimizer, **(options | wrong))
            except OptionError as error:
                found.append(str(error))
        with iobench.Checkpointer(runs, offload=optimizer, tiers=[tier], **options) as ckpt:
            try:
                ckpt.load(warm=True)
            except UsageError as error:
                found.append(str(error))
    return found


def assert_whole(remote: Path, *, unfinished: bool = False) -> list[Manifest]:
    """Compare each file of the optimizers in `remote` with the checksums of the manifests.

    There is nothing else, unless a copy is `unfinished`.
    """
    store = DirectoryStore(remote)
    manifests = [store.manifest(step) for step in store.steps()]
    for manifest in manifests:
        assert len(manifest.pinned) == manifest.world_size
        for pinned in manifest.pinned:
            (file,) = pinned.files
            data = (remote / f"step-{manifest.step}" / file.path).read_bytes()
            assert len(data) == file.size_bytes
            at = 0
            for piece in file.pieces:
                part = data[at : at + piece.size_bytes]
                assert xxhash.xxh3_64_hexdigest(part) == piece.xxh3_64
                at += piece.size_bytes
    hidden = [path.name for path in remote.iterdir() if path.name.startswith(".step-")]
    assert unfinished or not hidden
    return manifests


def lose(directory: Path) -> None:
    """The machine is lost: neither checkpoints nor the optimizer's files are left."""
    for name in ("runs", "state"):
        shutil.rmtree(directory / name)
