"""fill_together: all ranks copy a checkpoint of the remote tier to the local tier."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.staged import StagedCheckpoint
from iobench.checkpoint.store import DirectoryStore
from iobench.dist.drain.shares import shares
from iobench.dist.load.both_stores import BothStores
from iobench.dist.world import World
from iobench.errors import TargetError
from iobench.tiers.warm import fill_files, staged_locally
from iobench.writers.base import Writer

__all__ = ["fill_together"]


def fill_together(
    agreed: Callable[[str, Callable[[], Any]], list[Any]],
    world: World,
    both: BothStores,
    step: int,
    *,
    local: DirectoryStore,
    local_writer: Writer,
    remote_writer: Writer,
) -> Manifest:
    """Copy the checkpoint of `step`, a share of its files in each rank. Return its manifest.

    It becomes visible as a whole, when rank 0 sees all files; see `fill_local`. Raises the error of
    a rank in all ranks; then nothing of it is visible.
    """
    staged: list[StagedCheckpoint] = []
    with ExitStack() as stack:

        def begin() -> str | None:
            if world.rank:
                return None
            staged.append(stack.enter_context(staged_locally(local, both.manifest(step))))
            return str(staged[0].directory)

        directory = Path(agreed(f"copying step {step} here", begin)[0])

        def copy() -> None:
            files = shares(both.manifest(step).files, world.size)[world.rank]
            fill_files(files, both.locate(step), remote_writer, directory, local_writer)

        agreed(f"copy of step {step}", copy)

        def publish() -> None:
            manifest = both.manifest(step)
            for file in manifest.files if staged else ():
                path = directory / file.path
                if not path.exists() or path.stat().st_size != file.size_bytes:
                    raise TargetError(
                        f"{path}: another rank has copied it, but rank 0 does not see it; all "
                        "ranks need the same directory: choose one that all nodes share"
                    )
            for one in staged:
                one.publish([manifest.to_json()])

        agreed(f"step {step} is here", publish)
    return both.manifest(step)
