"""TieredCandidates: the checkpoints of local and remote tier, for a restore."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from iobench.checkpoint.manifest import MANIFEST, Manifest
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import (
    DataMismatchError,
    IobenchError,
    TargetError,
    TransferError,
    transfer_errors,
)
from iobench.units import format_size
from iobench.writers.base import Writer
from iobench.writers.copy_reader import CopyReader, StoredReader
from iobench.writers.image import FileImage
from iobench.writers.source import Source
from iobench.writers.transfer import Transfer

__all__ = ["Listed", "LocalFirst", "TieredCandidates"]


class Listed(NamedTuple):
    """A checkpoint that was found: in the local tier, at `remote` ("": not there), or both.

    If both have the step and the remote one was saved later, it is not `local`.
    """

    step: int
    serial: int | None
    local: bool
    remote: str


class LocalFirst:
    """The local copy of a checkpoint, and for a damaged range the remote copy of the same save.

    `remote` is called once, when a range is damaged. It may wait for the remote tier for as long as
    that takes, and returns None if it does not have this save.
    """

    def __init__(self, local: CopyReader, remote: Callable[[], CopyReader | None]) -> None:
        self._local, self._ask = local, remote
        self._lock = threading.Lock()
        self._asked = False
        self._remote: CopyReader | None = None
        self._damaged: dict[str, dict[tuple[int, int], str]] = {}  # names of pieces, by file
        self.name, self.direct, self.location = local.name, local.direct, local.location
        self.remote_bytes = 0
        """Bytes that came from the remote tier."""
        self.remote_problem = ""

    def read(self, image: FileImage, start: int = 0, stop: int | None = None) -> Transfer:
        return self._local.read(image, start, stop)

    def read_again(self, image: FileImage, start: int, stop: int, piece: str) -> bool:
        remote = self._remote_copy()
        damaged = self._damaged.setdefault(image.path, {})
        if remote is None or (start, stop) in damaged:
            return False
        damaged[start, stop] = piece
        try:
            remote.read(image, start, stop)
        except (DataMismatchError, TransferError) as error:
            self.remote_problem = str(error)
            return False
        self.remote_bytes += stop - start
        return True

    def _remote_copy(self) -> CopyReader | None:
        with self._lock:
            if not self._asked:
                try:
                    self._remote = self._ask()
                except IobenchError as error:
                    self.remote_problem = str(error)
                self._asked = True
        return self._remote

    def open_source(self, target: str) -> Source:
        return self._local.open_source(target)

    @property
    def local_problem(self) -> str:
        """What is damaged in the local copy."""
        found = []
        for path, pieces in self._damaged.items():
            names = ", ".join(list(pieces.values())[:5]) + (", ..." if len(pieces) > 5 else "")
            found.append(f"{path} is damaged, {len(pieces)} checksums differ: {names}")
        return "; ".join(found)

    def sources(self, local: str, remote: str) -> dict[str, str]:
        """Return what came from which tier, after the reads."""
        if not self.remote_bytes:
            return {local: "read", **({remote: self.remote_problem} if self.remote_problem else {})}
        there = [f"read {format_size(self.remote_bytes)}", self.remote_problem]
        return {
            local: f"read in part; {self.local_problem}",
            remote: "; ".join(filter(None, there)),
        }


class TieredCandidates:
    """The checkpoints of both tiers, as they are `listed`; the same in all ranks of a job.

    A checkpoint is read in the local tier if it is there. A piece that is damaged there comes from
    the remote copy of the same save; see `LocalFirst`. The next copy is the remote one as a whole.
    `late` waits for the list of the remote tier, and returns its places by step, if it came too
    late for `listed`.
    """

    readers = 1

    def __init__(
        self,
        local: DirectoryStore,
        local_writer: Writer,
        remote: str,
        remote_writer: Writer,
        listed: Sequence[Listed],
        late: Callable[[], Mapping[int, str]] | None = None,
    ) -> None:
        self._local, self._remote_name = local, remote
        self._local_writer, self._remote_writer = local_writer, remote_writer
        self._listed = {one.step: one for one in listed}
        self._late = late
        self._problems: dict[int, str] = {}  # of local copies that are left
        self._read: dict[int, LocalFirst] = {}

    def __str__(self) -> str:
        return str(self._local)

    def steps(self) -> list[int]:
        return sorted(self._listed)

    def serials(self) -> dict[int, int]:
        return {step: one.serial for step, one in self._listed.items() if one.serial is not None}

    def locate(self, step: int) -> str | Path:
        return self._local.locate(step) if self._is_local(step) else self._found(step).remote

    def manifest(self, step: int, *, files: bool = True) -> Manifest:
        if self._is_local(step):
            return self._local.manifest(step, files=files)
        return self._remote_manifest(self._found(step).remote, files=files)

    def reader(self, step: int, manifest: Manifest) -> CopyReader:
        if not self._is_local(step):
            return StoredReader(self._remote_writer, self._found(step).remote)
        local = StoredReader(self._local_writer, self._local.locate(step))
        self._read[step] = LocalFirst(local, partial(self._same, step, manifest))
        return self._read[step]

    def next_copy(self, step: int, problem: str) -> bool:
        if not self._is_local(step) or not self._found(step).remote:
            return False
        self._problems[step] = problem
        return True

    def sources(self, step: int) -> dict[str, str]:
        if self._is_local(step):
            read = self._read[step]
            if read.remote_bytes:
                message = f"step {step} is read from {self._remote_name} in part: "
                warnings.warn(message + read.local_problem, RuntimeWarning, stacklevel=3)
            return read.sources(str(self._local), self._remote_name)
        problem = self._problems.get(step)
        if problem is None:
            return {self._remote_name: "read"}
        message = f"step {step} is read from {self._remote_name}: {problem}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return {str(self._local): problem, self._remote_name: "read"}

    def _is_local(self, step: int) -> bool:
        return self._found(step).local and step not in self._problems

    def _found(self, step: int) -> Listed:
        if step not in self._listed:
            raise TargetError(f"{self}: holds no checkpoint of step {step}")
        return self._listed[step]

    def _same(self, step: int, manifest: Manifest) -> CopyReader | None:
        """Return the remote copy of the save with this manifest."""
        places = self._late() if self._late is not None else {}
        where = self._found(step).remote or places.get(step, "")
        if not where or self._remote_manifest(where) != manifest:
            return None
        return StoredReader(self._remote_writer, where)

    def _remote_manifest(self, place: str, *, files: bool = True) -> Manifest:
        where = os.path.join(place, MANIFEST)
        with (
            transfer_errors("reading", where),
            closing(self._remote_writer.open_source(where)) as source,
        ):
            return Manifest.parse(source.read(-1), where, files=files)
