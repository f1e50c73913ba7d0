"""Trainings that checkpoint offloaded state by a Checkpointer, and what is there when they die."""

from pathlib import Path

import torch

import iobench
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import TargetError
from iobench.offload import AdamW
from iobench.offload.files import read_layout
from iobench.offload.layout import Pin, read_records
from support.offload_kills import OffloadKills
from support.offload_training import (
    OPTIONS,
    VALUES,
    assert_equal,
    backward,
    give_gradients,
    has_generation,
    make_parameters,
    say,
    snapshot,
)

PINS = 3
KEPT = 2


def train_with_checkpoints(directory: Path, steps: int, *, overlap: bool = False) -> None:
    """Train until there are `steps` updates, with a checkpoint after each; report what is durable.

    A training that was killed goes on from its newest checkpoint. With `overlap` a real backward
    makes the gradients, and the next step begins while a checkpoint is being made.
    """
    parameters, state = make_parameters(), directory / "state"
    if has_generation(state):
        optimizer = AdamW.resume(parameters, state, memory=OPTIONS["memory"], overlap=overlap)
    else:
        optimizer = AdamW(parameters, state, **VALUES, **OPTIONS, pins=PINS, overlap=overlap)
    keep = iobench.KeepLast(KEPT)
    with iobench.Checkpointer(directory / "runs", keep=keep, offload=optimizer) as ckpt:
        if ckpt.latest() is not None:
            done = ckpt.load()["step"]
            assert done == optimizer.updates
        elif optimizer.updates == steps:  # killed before the first checkpoint of them was durable
            ckpt.save_async({"step": steps, "rng": torch.get_rng_state()}, steps)
        for step in range(optimizer.updates, steps):
            optimizer.zero_grad()
            (backward if overlap else give_gradients)(parameters, step)
            optimizer.step()
            ckpt.save_async({"step": step + 1, "rng": torch.get_rng_state()}, step + 1)
            for save in ckpt.saves:
                if save.status == "committed":
                    say("committed", save.step)
    optimizer.close()
    say("committed", steps)


def held(directory: Path) -> dict[str, Pin]:
    """The held pins of a state directory, by name."""
    records = read_records(directory, read_layout(directory))
    return {pin.name: pin for pin in (records[0].pins if records else ()) if pin.name}


def named(directory: Path) -> dict[int, str]:
    """The pins that the manifests of checkpoints name, by step."""
    try:
        store = DirectoryStore(directory)
        found = {step: store.manifest(step).offload for step in store.steps()}
    except TargetError:  # killed before it was made
        return {}
    assert all(found.values())
    return {step: one.pin for step, one in found.items() if one is not None}


class CheckpointKills(OffloadKills):
    """Kills `train_with_checkpoints`."""

    module, trainer = "support.offload_checkpoints", "train_with_checkpoints"

    def check(self, directory: Path, reported: dict[str, int]) -> int:
        """Each manifest names a pinned generation of its own step, each loads with its own bits,
        nothing that was reported is lost, and a start leaves no pin without a manifest."""
        state, runs = directory / "state", directory / "runs"
        if not has_generation(state):
            assert not reported
            assert not named(runs)
            return 0
        pins = held(state)
        for step, name in named(runs).items():
            assert pins[name].step == step
        with (
            AdamW.resume(make_parameters(9), state) as optimizer,
            iobench.Checkpointer(runs, keep=iobench.KeepLast(KEPT), offload=optimizer) as ckpt,
        ):
            steps = ckpt.steps()  # what a save had put aside is back
            assert max(steps, default=0) >= reported.get("committed", 0)
            optimizer.wait()
            assert held(state).keys() == set(named(runs).values())
            for step in steps:
                assert ckpt.load(step)["step"] == step == optimizer.updates
                assert_equal(snapshot(optimizer), self.expected[step - 1])
        return max(steps, default=0)
