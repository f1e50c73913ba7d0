"""BothStores: the checkpoints of local and remote tier, for a load of several ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from iobench.checkpoint.manifest import MANIFEST, Manifest
from iobench.checkpoint.store import CheckpointStore, DirectoryStore
from iobench.errors import TargetError
from iobench.remote.both_tiers import BothTiers, RemoteCheckpoint
from iobench.writers.availability import Availability
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.source import Source
from iobench.writers.stream import Stream
from iobench.writers.transfer import Transfer

__all__ = ["BothStores", "Listed"]


class Listed(NamedTuple):
    """A checkpoint that rank 0 has found: in the local tier, at `remote` ("": not there), or both.

    If both have the step and the remote one was saved later, it is not `local`.
    """

    step: int
    serial: int | None
    local: bool
    remote: str


class BothStores:
    """The read side of a CheckpointStore over both tiers, the same in all ranks.

    A checkpoint is read in the local tier if it is there. A piece that is damaged there comes from
    the remote copy of the same save. `next_tier` makes the remote tier the place of a checkpoint
    that cannot be read locally. `writer` reads in all of these places.
    """

    readers = 1

    def __init__(
        self,
        local: DirectoryStore,
        local_writer: Writer,
        remote: str,
        remote_writer: Writer,
        listed: Sequence[Listed],
    ) -> None:
        self._local, self._remote_name = local, remote
        self._listed = {one.step: one for one in listed}
        self._names = {local.locate(step).name: step for step in self._listed}
        self._abandoned: set[int] = set()  # local copies
        self._manifests: dict[int, Manifest] = {}
        self._remote_writer = remote_writer
        self._problems: dict[int, str] = {}
        self.writer = _Reads(self, local_writer, remote_writer)

    def __str__(self) -> str:
        return str(self._local)

    def steps(self) -> list[int]:
        """Return the steps of both tiers."""
        return sorted(self._listed)

    def serials(self) -> dict[int, int]:
        """Return the serial numbers by step."""
        return {step: one.serial for step, one in self._listed.items() if one.serial is not None}

    def is_local(self, step: int) -> bool:
        """Return whether `locate` gives the local copy."""
        return self._found(step).local and step not in self._abandoned

    def locate(self, step: int) -> str | Path:
        """Return the place where the checkpoint is read."""
        return self._local.locate(step) if self.is_local(step) else self._found(step).remote

    def next_tier(self, step: int, problem: str) -> bool:
        """Read the checkpoint in the remote tier from now on; False: it is not another place."""
        if not self.is_local(step) or not self._found(step).remote:
            return False
        self._abandoned.add(step)
        self._problems[step] = problem
        return True

    def manifest(self, step: int, *, files: bool = True) -> Manifest:
        """Return the manifest at the place of the checkpoint."""
        if self.is_local(step):
            found = self._local.manifest(step, files=files)
        else:
            found = self._remote_manifest(step, files=files)
        if files:
            self._manifests[step] = found
        return found

    def _remote_manifest(self, step: int, *, files: bool = True) -> Manifest:
        where = os.path.join(self._found(step).remote, MANIFEST)
        with closing(self._remote_writer.open_source(where)) as source:
            return Manifest.parse(source.read(-1), where, files=files)

    def _found(self, step: int) -> Listed:
        if step not in self._listed:
            raise TargetError(f"{self}: holds no checkpoint of step {step}")
        return self._listed[step]

    def sources(self, step: int) -> dict[str, str]:
        """Return the tiers that this rank has read, and what was wrong with them.

        Warns (RuntimeWarning) if some of the bytes come from the remote tier for that reason.
        """
        if self.is_local(step):
            tiers = self.writer.tiers(step)
            if tiers.local_problem:
                warnings.warn(
                    f"step {step} is read from {self._remote_name} in part: {tiers.local_problem}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return tiers.sources(str(self._local), self._remote_name)
        problem = self._problems.get(step, "")
        if problem:
            message = f"step {step} is read from {self._remote_name}: {problem}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return {**({str(self._local): problem} if problem else {}), self._remote_name: "read"}

    def has_remote_copy(self, step: int) -> bool:
        """Return whether the remote tier has the save that was begun to read."""
        found = self._found(step)
        return bool(found.remote) and self._remote_manifest(step) == self._manifests[step]

    def remote_copy(self, manifest: Manifest) -> tuple[str, Writer] | None:
        """See RemoteCopies."""
        found = self._listed.get(manifest.step)
        if found is None or not found.remote:
            return None
        same = self._remote_manifest(manifest.step) == manifest
        return (found.remote, self._remote_writer) if same else None

    def remote_place(self, step: int) -> str:
        """Return where the remote copy is."""
        return self._found(step).remote

    def step_at(self, target: str | Path) -> int | None:
        """Return the step that is read at or below `target` in the local tier."""
        path, top = str(target), f"{self._local}/"
        return (
            self._names.get(path.removeprefix(top).split("/")[0]) if path.startswith(top) else None
        )


class _Remote(NamedTuple):
    """The part of a CheckpointStore that BothTiers needs."""

    stores: BothStores

    def locate(self, step: int) -> str:
        return self.stores.remote_place(step)


class _Reads(Writer):
    """The reads of both tiers, by the place that is read."""

    schemes = ("file", "s3")

    def __init__(self, stores: BothStores, local: Writer, remote: Writer) -> None:
        self.name = local.name  # type: ignore[misc]  # of this one, not of the class
        self.options = local.options
        self._stores, self._local, self._remote = stores, local, remote
        self._tiers: dict[int, BothTiers] = {}

    def tiers(self, step: int) -> BothTiers:
        """Return what reads the local copy of a step, and damaged pieces in the remote one."""
        if step not in self._tiers:
            copy = RemoteCheckpoint(
                store=cast(CheckpointStore, _Remote(self._stores)),
                writer=self._remote,
                step=step,
                is_same=partial(self._stores.has_remote_copy, step),
            )
            self._tiers[step] = BothTiers(self._local, copy)
        return self._tiers[step]

    def _of(self, target: str | Path) -> Writer:
        step = self._stores.step_at(target)
        return self._remote if step is None else self.tiers(step)

    def read(
        self, image: FileImage, target: str | Path, *, start: int = 0, stop: int | None = None
    ) -> Transfer:
        return self._of(target).read(image, target, start=start, stop=stop)

    def read_again(self, image: FileImage, target: str | Path, start: int, stop: int) -> bool:
        """Fill a damaged range from the other tier; False: there is no other copy."""
        step = self._stores.step_at(target)
        return step is not None and self.tiers(step).read_again(image, start, stop)

    def open_source(self, target: str | Path) -> Source:
        return self._of(target).open_source(target)

    def available(self, target: str | Path = ".") -> Availability:
        return self._of(target).available(target)

    def write(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("it only reads")

    def open(self, target: str | Path, size: int | None = None) -> Stream:
        del target, size
        raise AssertionError("it only reads")
