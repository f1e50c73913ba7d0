"""TieredStore: which checkpoints the local and the remote tier have, for restores from both."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from iobench.checkpoint.manifest import MANIFEST, Manifest
from iobench.checkpoint.restore import Candidates
from iobench.checkpoint.retention import outlines
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import (
    DataMismatchError,
    IobenchError,
    TargetError,
    TransferError,
    transfer_errors,
)
from iobench.remote.local_tier import LocalTier
from iobench.units import format_size
from iobench.writers.base import CopyReader, Source, StoredReader, Writer
from iobench.writers.image import FileImage, Ranges
from iobench.writers.transfer import Transfer

_ANSWER_S = 5.0
"""How long a restore waits for a list of the remote tier, when the local tier has checkpoints."""


class Listed(NamedTuple):
    """A checkpoint that was found: in the local tier, at `remote` ("": not there), or both.

    If both have the step and the remote one was saved later, it is not `local`.
    """

    step: int
    serial: int | None
    local: bool
    remote: str


class MendedReader:
    """The copy `near` of a checkpoint; a damaged range comes from another copy of the same save.

    `ask` returns that one, or None. It is called when a range is damaged.
    """

    def __init__(self, near: CopyReader, ask: Callable[[], CopyReader | None]) -> None:
        self._near, self._ask = near, ask
        self._damaged: dict[str, dict[tuple[int, int], str]] = {}  # names of pieces, by file
        self.name, self.location = near.name, near.location
        self.far_bytes = 0
        """Bytes that came from the other copy."""
        self._far_problem = ""

    def read(self, image: FileImage, ranges: Ranges | None = None) -> Transfer:
        return self._near.read(image, ranges)

    def read_again(self, image: FileImage, start: int, stop: int, piece: str) -> bool:
        far = self._far
        damaged = self._damaged.setdefault(image.path, {})
        if far is None:
            return False
        if (start, stop) in damaged:
            return far.read_again(image, start, stop, piece)
        damaged[start, stop] = piece
        try:
            far.read(image, [(start, stop)])
        except (DataMismatchError, TransferError) as error:
            self._far_problem = str(error)
            return False
        self.far_bytes += stop - start
        return True

    @cached_property
    def _far(self) -> CopyReader | None:
        try:
            return self._ask()
        except IobenchError as error:
            self._far_problem = str(error)
            return None

    def open_source(self, target: str) -> Source:
        return self._near.open_source(target)

    def sources(self, step: int, near: str, far: str) -> dict[str, str]:
        """Return what came from which copy, after the reads. Warns of damage that was mended."""
        if not self.far_bytes:
            return {near: "read", **({far: self._far_problem} if self._far_problem else {})}
        found = []
        for path, pieces in self._damaged.items():
            names = ", ".join(list(pieces.values())[:5]) + (", ..." if len(pieces) > 5 else "")
            found.append(f"{path} is damaged, {len(pieces)} checksums differ: {names}")
        problem = "; ".join(found)
        message = f"step {step} is read from {far} in part: {problem}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)
        there = [f"read {format_size(self.far_bytes)}", self._far_problem]
        return {near: f"read in part; {problem}", far: "; ".join(filter(None, there))}


class TieredCandidates(Candidates):
    """The checkpoints of both tiers, as they are `listed`; the same in all ranks of a job.

    A checkpoint is read in the local tier if it is there. A piece that is damaged there comes from
    the remote copy of the same save. The next copy is the remote one as a whole.
    """

    def __init__(
        self,
        local: DirectoryStore,
        local_writer: Writer,
        remote: str,
        remote_writer: Writer,
        listed: Sequence[Listed],
    ) -> None:
        super().__init__(local, local_writer)
        self._local, self._remote_name, self._remote_writer = local, remote, remote_writer
        self._listed = {one.step: one for one in listed}
        self._problems: dict[int, str] = {}  # of local copies that are left
        self._read: dict[int, MendedReader] = {}

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
        local = super().reader(step, manifest)
        self._read[step] = MendedReader(local, partial(self._same, manifest))
        return self._read[step]

    def next_copy(self, step: int, problem: str) -> bool:
        if not self._is_local(step) or not self._found(step).remote:
            return False
        self._problems[step] = problem
        return True

    def sources(self, step: int) -> dict[str, str]:
        if self._is_local(step):
            return self._read[step].sources(step, str(self._local), self._remote_name)
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

    def remote_copy(self, manifest: Manifest) -> tuple[str | Path, Writer] | None:
        """Return where the remote tier has this very save, and its writer; None if it has not."""
        listed = self._listed.get(manifest.step)
        if listed is None or not listed.remote or self._remote_manifest(listed.remote) != manifest:
            return None
        return listed.remote, self._remote_writer

    def _same(self, manifest: Manifest) -> CopyReader | None:
        found = self.remote_copy(manifest)
        return None if found is None else StoredReader(found[1], found[0])

    def _remote_manifest(self, place: str, *, files: bool = True) -> Manifest:
        where = os.path.join(place, MANIFEST)
        with (
            transfer_errors("reading", where),
            closing(self._remote_writer.open_source(where)) as source,
        ):
            return Manifest.parse(source.read(-1), where, files=files)


class TieredStore:
    """The checkpoints of both tiers, for one restore, as the process that drains sees them.

    The remote tier is asked for a list at once; `ask` comes first. A step that both tiers have is
    read from the local one, with the help of the remote one if it is of the same save. A later save
    of the step, made by another node, counts instead of the local one. `known` has the serial
    numbers of the local checkpoints.
    """

    def __init__(self, local: LocalTier, known: Mapping[int, int]) -> None:
        self._local, self._known = local, known
        self._has_local = bool(local.steps())
        self._remote = local.remote.store
        self._in_remote: dict[int, int | None] = {}
        """Steps, and serial numbers where the remote tier has them; after `ask`."""
        self._answer: dict[int, int | None] = {}
        self._failure: Exception | None = None
        self._done, self._began_s = threading.Event(), time.monotonic()
        # Never joined: a server that hangs delays only those who call `ask`.
        threading.Thread(target=self._list, name="iobench-list", daemon=True).start()

    def _list(self) -> None:
        try:
            self._answer = self._listed()
        except Exception as error:  # noqa: BLE001 -- raised or told by `ask`
            self._failure = error
        finally:
            self._done.set()

    def _listed(self) -> dict[int, int | None]:
        store = self._remote
        if isinstance(store, DirectoryStore) and not os.path.lexists(store.directory):
            return {}  # nothing was copied to it yet
        found: dict[int, int | None] = dict.fromkeys(store.steps())
        found.update(store.serials())
        unknown = [step for step, serial in found.items() if serial is None]
        for step, manifest in outlines(store, unknown).items():
            found[step] = manifest.serial if manifest else None
        return found

    def ask(self) -> None:
        """Wait for the list. Without an answer only the local tier counts, with a RuntimeWarning.

        Raises what the remote tier raises if the local one has no checkpoint.
        """
        left_s = max(0.0, self._began_s + _ANSWER_S - time.monotonic())
        if self._done.wait(left_s if self._has_local else None):
            failure, self._in_remote = self._failure, self._answer
        else:
            failure = TransferError(f"no answer within {_ANSWER_S:g} s")
        if failure is None:
            return
        if not self._has_local:
            raise failure
        warnings.warn(
            f"{self._remote} cannot be asked for checkpoints ({failure}): the newest one of "
            f"{self._local} counts",
            RuntimeWarning,
            stacklevel=4,
        )

    @property
    def last_serial(self) -> int:
        """The greatest serial number in the remote tier; 0 without one."""
        return max((serial or 0 for serial in self._in_remote.values()), default=0)

    def listed(self) -> list[Listed]:
        """Return all checkpoints."""
        own = set(self._local.steps())
        found = []
        for step in sorted(own | self._in_remote.keys()):
            here, there = self._known.get(step), self._in_remote.get(step)
            later = here is not None and there is not None and there > here
            place = str(self._remote.locate(step)) if step in self._in_remote else ""
            serial = there if later or here is None else here
            found.append(Listed(step, serial, step in own and not later, place))
        return found
