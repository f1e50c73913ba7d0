"""What the ranks of a RankPool do with a placement: functions that they call by name."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import iobench
from iobench.checkpoint.ranked.dcp_files import DcpFormat
from iobench.errors import TransferError
from iobench.remote.placement import LOCAL, REMOTE
from iobench.units import MIB
from iobench.writers.s3 import S3Writer
from tests.support.rank_pool import in_world
from tests.support.rank_saves import _SECONDS, _raised
from tests.support.rank_states import digest, full, state_of
from tests.support.rank_tiers import _until_verified

__all__ = ["fails", "late", "measures", "placed", "refused"]


@contextlib.contextmanager
def _opened(
    size: int, local: str, remote: str, environ: dict[str, str], *memory: Any, **options: Any
) -> Iterator[iobench.Checkpointer]:
    """Open a Checkpointer, and wait until rank 0 may write to the remote tier."""
    writer = options.pop("writer", "")
    placement = iobench.Placement(**options)
    tiers = [*memory, iobench.Remote(remote, writer=writer)]
    with (
        mock.patch.dict(os.environ, environ),
        iobench.Checkpointer(
            local, world=in_world(size), deadline_s=_SECONDS, tiers=tiers, placement=placement
        ) as ckpt,
    ):
        until_s = time.monotonic() + _SECONDS
        while ckpt._tier is not None and ckpt._tier.drain.leads and not ckpt._tier.remote.is_open:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        yield ckpt


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
    with _opened(size, local, remote, environ, *own) as ckpt:
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
        assert ckpt.loaded is not None
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

    def fail(self: DcpFormat, save: Any, content: Any, memory: Any, target: Any, offer: Any) -> Any:
        directories.append(str(target.directory))
        remotely = directories[-1].startswith(remote) and len(directories) == 1
        if remotely and world.rank == victim and before:
            raise TransferError(110, "Connection timed out", remote)
        done = write(self, save, content, memory, target, offer)
        if remotely and world.rank == victim:
            raise TransferError(110, "Connection timed out", remote)
        return done

    with (
        warnings.catch_warnings(record=True) as said,
        mock.patch.object(DcpFormat, "write", fail),
    ):
        warnings.simplefilter("always")
        with _opened(size, local, remote, environ, goal="capacity") as ckpt:
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
    with _opened(size, local, remote, {}, goal="capacity") as ckpt:
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
        with _opened(size, local, remote, own, writer=S3Writer(max_attempts=1)) as ckpt:
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


def refused(size: int, local: str, remote: str) -> str:
    """A placement together with replicas."""
    options: dict[str, Any] = {
        "tiers": [iobench.Remote(remote)],
        "placement": iobench.Placement(),
        "replicate": iobench.Partner(),
    }
    return _raised(lambda: iobench.Checkpointer(local, world=in_world(size), **options))
