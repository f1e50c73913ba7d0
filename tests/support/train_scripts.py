"""What the ranks of a trainer do in the tests of faults: load, check, save, and report."""

import os
import threading
from pathlib import Path
from typing import Any

import torch

from iobench import Checkpointer, KeepLast, PerRank, load_checkpoint
from iobench.errors import RankError
from iobench.ranks.restore_plan import RestoreMode
from iobench.ranks.world import World
from support.rank_scripts import impatient

_SIZE = 20_000
_SILENT_S = 2.0
_CONNECT_S = 10.0


def made(step: int, rank: int, own: int = 100) -> dict[str, Any]:
    """Return the state of a rank at a step: replicated tensors, and one of the rank itself, which
    has `own` elements."""
    return {
        "w": torch.full((_SIZE,), float(step)),
        "small": torch.full((3, 5), float(step)),
        "own": PerRank({"seed": torch.full((own,), 1000.0 * step + rank), "rank": rank}),
        "step": step,
    }


def check(state: dict[str, Any], step: int, rank: int) -> None:
    """Raise AssertionError unless every value is that of this step and rank."""
    assert state["step"] == step, (state["step"], step)
    assert state["w"].shape == (_SIZE,)
    for name in ("w", "small"):
        assert state[name].unique().tolist() == [step], (name, state[name].unique())
    own = state["own"]
    assert own["rank"] == rank, own
    assert own["seed"].unique().tolist() == [1000.0 * step + rank], own


def newest_checked(directory: Path) -> int:
    """Return the newest step after a check of every value and of each visible name; -1 if none.

    All visible names must be complete checkpoints.
    """
    names = [name for name in os.listdir(directory) if not name.startswith(".")]
    for name in names:
        assert (directory / name / "manifest.json").exists(), sorted(os.listdir(directory / name))
    if not names:
        return -1
    state = load_checkpoint(directory)
    for rank, own in enumerate(state["own"].values):
        check({**state, "own": own}, state["step"], rank)
    return int(state["step"])


def say(text: str) -> None:
    """Print a line."""
    os.write(1, f"{text}\n".encode())  # one write, because a kill falls between two


def trains(
    directory: str,
    saves: int,
    pause_s: float = 0.0,
    how: str = "async",
    restore_mode: RestoreMode = "auto",
) -> None:
    """Load the newest checkpoint and save some more; exit with 3 after a RankError.

    `how`: "async", "sync", or "wait": asynchronous, and waits for each save. "retry" goes on after
    a failed save, "previous" passes over damaged checkpoints; both wait.

    Prints "begin", "open", "loaded N" (-1: none), "saved N" and "done".
    """
    say("begin")
    world = World.detect()
    try:
        impatient(_CONNECT_S, _SILENT_S)
        with Checkpointer(directory, keep=KeepLast(2), writer="odirect") as ckpt:
            say("open")
            step = ckpt.latest()
            if step is not None:
                state = ckpt.load(
                    on_corrupt="previous" if how == "previous" else "raise",
                    restore_mode=restore_mode,
                )
                step = ckpt.loaded.step
                check(state, step, world.rank)
            say(f"loaded {-1 if step is None else step}")
            _train(ckpt, -1 if step is None else step, world.rank, saves, pause_s, how)
    except RankError as error:
        say(f"lost {list(error.ranks)} {error}")
        raise SystemExit(3) from None
    say("done")


def _train(ckpt: Checkpointer, step: int, rank: int, saves: int, pause_s: float, how: str) -> None:
    reported = step
    for now in range(step + 1, step + 1 + saves):
        try:
            (ckpt.save if how == "sync" else ckpt.save_async)(made(now, rank), now)
            if how != "async":
                ckpt.wait()
        except RankError as error:
            if how != "retry":
                raise
            say(f"failed {now} {error}")
        committed = max((s.step for s in ckpt.saves if s.status == "committed"), default=-1)
        if committed > reported:
            reported = committed
            say(f"saved {committed}")
        if pause_s:
            threading.Event().wait(pause_s)
