"""What the ranks of a RankPool do with a remote tier: functions that they call by name."""

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import iobench
from iobench.checkpoint.place import SaveJob
from iobench.checkpoint.ranked.dcp_files import DcpFormat
from iobench.errors import TransferError
from iobench.remote.drain import Drain
from iobench.remote.file_copier import FileCopier
from iobench.remote.placement import LOCAL, REMOTE
from iobench.units import MIB
from iobench.writers.s3 import S3Writer
from tests.support.rank_pool import in_world
from tests.support.rank_saves import _SECONDS, _other_node, _raised
from tests.support.rank_states import digest, full, state_of
from tests.support.tiers import until


@contextlib.contextmanager
def _opened(
    size: int, local: str, remote: str, environ: dict[str, str], *memory: Any, **options: Any
) -> Iterator[iobench.Checkpointer]:
    """Open a Checkpointer. With a placement, wait until rank 0 may write to the remote tier."""
    own = {name: options.pop(name, None) for name in ("keep", "on_event", "placement")}
    tiers = [*memory, iobench.Remote(remote, **options)]
    with (
        mock.patch.dict(os.environ, environ),
        iobench.Checkpointer(
            local, world=in_world(size), deadline_s=_SECONDS, tiers=tiers, **own
        ) as ckpt,
    ):
        if own["placement"] and ckpt._tier is not None and ckpt._tier.drain.leads:
            until(lambda: ckpt._tier.remote.is_open)
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
    until(lambda: save.copies[-1].state == "verified")
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
    size: int, local: str, remote: str, environ: dict[str, str], mode: str, step: Any = "latest"
) -> dict[str, Any]:
    """Load a checkpoint; return its epoch, whether the tensors are right, and where it was."""
    world = in_world(size)
    with (
        warnings.catch_warnings(record=True) as said,
        _opened(size, local, remote, environ) as ckpt,
    ):
        warnings.simplefilter("always")
        state = ckpt.load(step, restore_mode=mode)
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


_TO_REMOTE = iobench.Placement(goal="capacity")


def _measured(ckpt: iobench.Checkpointer, faster: str) -> None:
    """Add transfers that show which tier is faster, in rank 0."""
    if ckpt._tier is not None:
        for _ in range(3):
            ckpt._tier.rates.add(LOCAL, 10**6, 1.0 if faster == LOCAL else 9.0)
            ckpt._tier.rates.add(REMOTE, 10**6, 1.0 if faster == REMOTE else 9.0)


def placed(
    size: int, local: str, remote: str, environ: dict[str, str], memory: bool
) -> dict[str, Any]:
    """Save to the local tier, to the remote one, and to the local one again."""
    world = in_world(size)
    own = [iobench.Memory(size * 16 * MIB)] if memory else []
    with _opened(size, local, remote, environ, *own, placement=iobench.Placement()) as ckpt:
        state = state_of(world.rank, size, "rows", seed=1)
        made = [ckpt.save(state, 1)]
        first = _until_verified(made[0])
        _measured(ckpt, REMOTE)
        made.append(ckpt.save_async(state_of(world.rank, size, "rows", seed=2), 2))
        ckpt.wait()
        found: dict[str, Any] = {
            "first": first,
            "second": [(one.tier, one.state) for one in made[1].copies],
            "latest": ckpt.latest(),
        }
        state = ckpt.load()
        state["model"].pop("tied")
        found["right"] = digest(state["model"]) == digest(full(2))
        found["sources"] = ckpt.loaded.sources
        _measured(ckpt, LOCAL)
        _measured(ckpt, LOCAL)
        made.append(ckpt.save(state_of(world.rank, size, "rows", seed=3), 3))
        ckpt.wait(until="remote")
        found["third"] = made[2].copies[0].tier
        found["steps"] = ckpt.steps()
        ckpt.remove(2)
        found["left"] = ckpt.steps()
        return found


def fails(
    size: int, local: str, remote: str, environ: dict[str, str], victim: int, before: bool
) -> dict[str, Any]:
    """One rank cannot write its part to the remote tier, or learns of it after the write."""
    world = in_world(size)
    write, directories = DcpFormat.write, list[str]()

    def fail(self: DcpFormat, job: SaveJob, offer: Any) -> Any:
        directories.append(str(job.target.directory))
        remotely = directories[-1].startswith(remote) and len(directories) == 1
        if remotely and world.rank == victim and before:
            raise TransferError(110, "Connection timed out", remote)
        done = write(self, job, offer)
        if remotely and world.rank == victim:
            raise TransferError(110, "Connection timed out", remote)
        return done

    with warnings.catch_warnings(record=True) as said, mock.patch.object(DcpFormat, "write", fail):
        warnings.simplefilter("always")
        with _opened(size, local, remote, environ, placement=_TO_REMOTE) as ckpt:
            save = ckpt.save_async(state_of(world.rank, size, "rows", seed=1), 1)
            ckpt.wait()
            found: dict[str, Any] = {
                "status": save.status,
                "copy": [save.copies[0].tier, save.copies[0].state],
                "wrote": [one.startswith(remote) for one in directories],
            }
            ckpt.save(state_of(world.rank, size, "rows", seed=2), 2)
            ckpt.wait(until="remote")
            found["steps"] = ckpt.steps()
    found["said"] = [str(one.message) for one in said if one.category is RuntimeWarning]
    return found


def measures(size: int, local: str, remote: str) -> Any:
    """The local tier is measured by all ranks after a direct save; nothing is left of it."""
    world = in_world(size)
    with _opened(size, local, remote, {}, placement=_TO_REMOTE) as ckpt:
        for step in (1, 2):
            ckpt.save_async(state_of(world.rank, size, "replicated", seed=step), step)
            ckpt.wait()
        if ckpt._tier is None or not ckpt._tier.drain.leads:
            return None
        return [one.size_bytes for one in ckpt._tier.rates.seen[LOCAL]]


def late(size: int, local: str, remote: str, environ: dict[str, str]) -> dict[str, Any]:
    """The bucket does not answer rank 1, until the direct save has failed."""
    world = in_world(size)
    own = dict(environ)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        if world.rank == 1:
            own["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {"writer": S3Writer(max_attempts=1), "placement": iobench.Placement()}
        with _opened(size, local, remote, own, **options) as ckpt:
            if ckpt._tier is not None:
                for _ in range(3):
                    ckpt._tier.rates.add(REMOTE, 10**9, 0.1)
                    ckpt._tier.rates.add(LOCAL, 10**9, 1.0)
            save = ckpt.save_async(state_of(world.rank, size, "rows", seed=1), 1)
            ckpt.wait()
            silent.close()  # the copy must not wait for it
            found = {"status": save.status, "copy": save.copies[0].tier, "steps": ckpt.steps()}
    texts = [str(one.message) for one in said if one.category is RuntimeWarning]
    return {**found, "said": [text for text in texts if "is written to" in text]}


def placement_refused(size: int, local: str, remote: str) -> str:
    """A placement together with replicas."""
    options: dict[str, Any] = {
        "tiers": [iobench.Remote(remote)],
        "placement": iobench.Placement(),
        "replicate": iobench.Partner(),
    }
    return _raised(lambda: iobench.Checkpointer(local, world=in_world(size), **options))
