"""What the ranks of a RankPool do with a remote tier: functions that they call by name."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import iobench
from iobench.remote.drain import Drain
from iobench.remote.file_copier import FileCopier
from tests.support.rank_pool import in_world
from tests.support.rank_saves import _other_node, _raised
from tests.support.rank_states import digest, full, state_of

__all__ = ["dead", "node_local", "refused", "restores", "saves", "warned"]


@contextlib.contextmanager
def _opened(
    size: int, local: str, remote: str, environ: dict[str, str], **options: Any
) -> Iterator[iobench.Checkpointer]:
    keep, on_event = options.pop("keep", None), options.pop("on_event", None)
    one = iobench.Remote(remote, **options)
    with (
        mock.patch.dict(os.environ, environ),
        iobench.Checkpointer(
            local,
            world=in_world(size),
            deadline_s=60,
            tiers=[one],
            keep=keep,
            on_event=on_event,
        ) as ckpt,
    ):
        yield ckpt


@contextlib.contextmanager
def _moved(what: str) -> Iterator[list[str]]:
    """Record the files that this rank sends, or reads back."""
    names: list[str] = []
    original = FileCopier.done

    def done(self: FileCopier, order: Any, files: Any, *more: Any) -> int:
        names.extend(file.path for file in files if order["do"] == what)
        return original(self, order, files, *more)

    with mock.patch.object(FileCopier, "done", done):
        yield names


def _until_verified(save: Any) -> list[str]:
    """Wait until this rank knows that the remote copy was read back; return the states."""
    until_s = time.monotonic() + 30
    while save.copies[-1].state != "verified" and time.monotonic() < until_s:
        time.sleep(0.01)
    return [copy.state for copy in save.copies]


def saves(
    size: int, local: str, remote: str, environ: dict[str, str], steps: list[int]
) -> dict[str, Any]:
    """Save these steps, one after the other, and wait for the copies."""
    world = in_world(size)
    told: list[tuple[int, str]] = []
    with (
        _moved("send") as sent,
        _moved("read back") as compared,
        _opened(
            size,
            local,
            remote,
            environ,
            keep=iobench.KeepLast(1),
            on_event=lambda save, event: told.append((save.step, event)),
        ) as ckpt,
    ):
        for step in steps:
            made = ckpt.save_async(state_of(world.rank, size, "rows", seed=step), step)
            ckpt.wait(until="remote")
            states = _until_verified(made)  # the next save may remove this one then
        found = {
            "sent": sorted(set(sent)),
            "compared": sorted(set(compared)),
            "states": states,
            "steps": ckpt.steps(),
            "latest": ckpt.latest(),
        }
    return {**found, "told": told}


def restores(
    size: int,
    local: str,
    remote: str,
    environ: dict[str, str],
    mode: str,
    step: Any = "latest",
) -> dict[str, Any]:
    """Load a checkpoint; return its epoch, whether the tensors are right, and where it was."""
    world = in_world(size)
    with (
        warnings.catch_warnings(record=True) as said,
        _opened(size, local, remote, environ) as ckpt,
    ):
        warnings.simplefilter("always")
        state = ckpt.load(step, restore_mode=mode)
        assert ckpt.loaded is not None
        state["model"].pop("tied")
        return {
            "epoch": state["epoch"],
            "right": digest(state["model"]) == digest(full(state["epoch"] - 5)),
            "sources": ckpt.loaded.sources,
            "said": [str(one.message) for one in said if one.category is RuntimeWarning],
            "steps": ckpt.steps(),
            "rank": world.rank,
        }


def node_local(size: int, local: str, remote: str) -> list[str]:
    """Rank 1 has another file system at the path of the remote tier."""
    other = in_world(size).rank == 1
    with (
        _other_node(remote) if other else contextlib.nullcontext(),
        warnings.catch_warnings(),
        _opened(size, local, remote, {}) as ckpt,
    ):
        warnings.simplefilter("ignore", RuntimeWarning)
        ckpt.save({"w": torch.ones(3)}, 1)
        return [_raised(lambda: ckpt.wait(until="remote"))]


def dead(size: int, local: str, remote: str, environ: dict[str, str]) -> list[Any]:
    """The server does not answer: saves and loads go on, and close does not wait."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        writer = iobench.writers.s3.S3Writer(max_attempts=1)
        with _opened(size, local, remote, environ, writer=writer) as ckpt:
            save = ckpt.save({"w": torch.ones(3)}, 10)
            error = _raised(lambda: ckpt.wait(until="remote"))
            state = ckpt.load()
            found = [save.copies[0].state, error, float(state["w"].sum()), ckpt.steps()]
    return [*found, [str(one.message) for one in said if one.category is RuntimeWarning]]


def warned(size: int, local: str, remote: str) -> list[Any]:
    """Close while a filter makes errors of warnings; open and close again."""
    world = in_world(size)

    def wait(*_: Any) -> bool:
        warnings.warn("step 1 is not copied", RuntimeWarning, stacklevel=2)
        return False

    with contextlib.ExitStack() as stack:
        ckpt = stack.enter_context(_opened(size, local, remote, {}))
        ckpt.save({"w": torch.ones(3)}, 1)
        with mock.patch.object(Drain, "_wait", wait), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            first = _raised(ckpt.close)
        open_still = ckpt._unclosed.alive
    with _opened(size, local, remote, {}) as again:
        return [world.rank, first, open_still, again.steps()]


def refused(size: int, local: str) -> list[str]:
    """What several ranks cannot have is refused in each of them."""
    world = in_world(size)
    wrong = [iobench.Remote(local)]
    return [_raised(lambda: iobench.Checkpointer(local, world=world, tiers=wrong))]
