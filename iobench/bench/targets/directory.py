"""DirectoryTarget: checkpoints in a directory of a mounted file system."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from iobench.bench.processes.interrupts import deferred_interrupts
from iobench.bench.targets.base import OpenTarget, Scratch, detach_mounts
from iobench.environment import DeviceMonitor, Machine, Storage, describe_machine, describe_storage
from iobench.environment.storage import check_directory
from iobench.errors import TargetError, transfer_errors
from iobench.units import MIB
from iobench.writers.own_directory import OwnDirectory, remove_killed
from iobench.writers.s3_store.target import is_s3

_SPARE_FRACTION, _SPARE_BYTES = 0.05, 256 * MIB  # of the target's space left free


@dataclass(frozen=True, kw_only=True)
class DirectoryTarget:
    """A writable directory that exists."""

    path: Path
    no_ceiling = ""
    notes: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        return str(self.path.resolve())

    def check(self) -> None:
        check_directory(self.path)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise TargetError(f"--target {self.path}: cannot be written; choose another directory")

    def free_bytes(self) -> int | None:
        """Return the free bytes, less a margin."""
        space = os.statvfs(self.path)
        free = space.f_bavail * space.f_frsize
        return max(0, int(free * (1 - _SPARE_FRACTION)) - _SPARE_BYTES)

    def describe(self) -> tuple[Machine, Storage]:
        return describe_machine(), describe_storage(self.path)

    def monitor(self) -> DeviceMonitor:
        return DeviceMonitor(self.path)

    @contextmanager
    def scratch(self) -> Iterator[Scratch]:
        with scratch_directory(self.path) as directory:
            yield Scratch(location=str(directory))


class LocalTargets:
    """The storage of a run on the machine of one rank.

    With `counts`, this rank is the one that counts and settles there; on rank 0's machine the run
    itself does that. `away` says that it is another machine than that of rank 0.
    """

    def __init__(self, scratch: Sequence[str], *, counts: bool, away: bool) -> None:
        self.counts, self.away = counts, away
        directories = [Path(one) for one in scratch if not is_s3(one)]
        self._targets = [
            OpenTarget.at(Scratch(location=str(one)), DeviceMonitor(one)) for one in directories
        ]

    def under(self, location: str) -> OpenTarget | None:
        """Return the target of a checkpoint; None for one in a bucket."""
        parents = Path(location).parents
        return next((one for one in self._targets if one.scratch.directory in parents), None)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Run a block, and return when earlier work of this machine has left the storage alone."""
        with contextlib.ExitStack() as waits:
            if self.counts:
                for one in self._targets:
                    waits.enter_context(one.settled())
            yield


PREFIX = ".iobench-run-"


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """Make a new directory in `target` that exists until the block ends.

    It is removed at the end, on an error and on Ctrl-C, which cannot interrupt the removal. What
    killed runs of this user left is removed first; see `OwnDirectory`. Raises TargetError when
    `target` is not a writable directory.
    """
    check_directory(target)
    name = f"{PREFIX}{os.geteuid()}-"
    own = OwnDirectory(target / f"{name}{secrets.token_hex(6)}")
    try:
        try:
            try:
                own.make()
            except OSError as error:
                raise TargetError(
                    f"--target {target}: cannot be written ({error.strerror or error})"
                ) from error
            try:
                remove_killed(target, f"{name}*", detach_mounts)
            except OSError as error:
                raise TargetError(
                    f"{error.filename}: left by a killed run, cannot be removed ({error.strerror})"
                ) from error
            yield own.root
        finally:
            _remove(own)
    finally:
        _remove(own)  # again, for an interrupt just before the first call


def _remove(own: OwnDirectory) -> None:
    with (
        transfer_errors("the next run removes what is left; removing", own.root),
        deferred_interrupts(),
    ):
        detach_mounts(own.root)
        own.remove()
