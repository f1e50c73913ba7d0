"""DirectoryTarget: checkpoints in a directory of a mounted file system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iobench.bench.counters.monitor import Monitor
from iobench.bench.targets.cold import FilesBelow, make_cold
from iobench.bench.targets.instruments import Instruments
from iobench.bench.targets.scratch import detach_mounts, scratch_directory
from iobench.bench.targets.settle import Patience, settled
from iobench.checkpoint.staged import StagedCheckpoint
from iobench.environment import DeviceMonitor, describe_environment
from iobench.environment.storage import check_directory
from iobench.errors import TargetError
from iobench.results.records import Cold
from iobench.units import MIB
from iobench.writers.removal import remove_tree

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

    def describe(self) -> tuple[dict[str, Any], dict[str, Any]]:
        described = describe_environment(self.path)
        return described["machine"], described["storage"]

    def monitor(self) -> DeviceMonitor:
        return DeviceMonitor(self.path)

    @contextmanager
    def scratch(self) -> Iterator[DirectoryScratch]:
        with scratch_directory(self.path) as directory:
            yield DirectoryScratch(directory=directory)


@dataclass(frozen=True, kw_only=True)
class DirectoryScratch:
    """The run's own directory."""

    directory: Path

    def locate(self, name: str) -> str:
        return str(self.directory / name)

    def staged(self, name: str) -> StagedCheckpoint:
        return StagedCheckpoint(self.directory / name)

    def instruments(self, monitor: Monitor) -> Instruments:
        return Instruments.probe(self.directory, monitor)

    def make_cold(self, name: str) -> Cold:
        return make_cold(FilesBelow(self.directory / name))

    def remove(self, name: str) -> None:
        path = self.directory / name
        detach_mounts(path)
        if path.exists():
            remove_tree(path)

    def settled(self, monitor: Monitor, patience: Patience) -> AbstractContextManager[None]:
        return settled(self.directory, monitor, patience)
