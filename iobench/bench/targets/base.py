"""Target: where a run stores its checkpoints: a directory, or a prefix in a bucket.

`Target` and `Scratch` hide the difference from the runner and its trials.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from iobench import linux
from iobench.bench.counters.sampler import Sampler
from iobench.bench.targets.cold import EvictedFiles, FilesBelow, make_cold, opened, resident_bytes
from iobench.bench.targets.instruments import Changes, Instruments
from iobench.bench.targets.settle import Patience, settled
from iobench.checkpoint.object_store import StagedObjects
from iobench.checkpoint.store import Staged, StagedCheckpoint
from iobench.environment import DeviceMonitor, Machine, Storage
from iobench.environment.mounts import mount_id_of, mounts_in
from iobench.results.records import Cold, Stored
from iobench.writers.base import Writer
from iobench.writers.removal import remove_tree

Location = str | Path
"""The location that a writer receives: a directory, or `s3://bucket/prefix`."""


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """The run's own space in its target: empty at first, removed at the end."""

    location: str
    writer: Writer | None = None
    """Stores in a bucket; None in a directory."""

    @property
    def directory(self) -> Path | None:
        """The space as a directory; None in a bucket."""
        return Path(self.location) if self.writer is None else None

    def locate(self, name: str) -> str:
        """Return the location of the published checkpoint `name`."""
        return f"{self.location}/{name}"

    def staged(self, name: str) -> AbstractContextManager[Staged]:
        """Return the new checkpoint `name`; it is removed if its block ends without `publish`."""
        if self.writer is not None:
            return StagedObjects(self.locate(name), self.writer)
        return StagedCheckpoint(Path(self.locate(name)))

    def remove(self, name: str) -> None:
        """Remove the checkpoint `name`, if there is one."""
        if self.writer is not None:
            self.writer.objects(self.locate(name)).remove()
            return
        path = Path(self.locate(name))
        detach_mounts(path)
        if path.exists():
            remove_tree(path)


def detach_mounts(directory: Path) -> None:
    """Unmount what a writer mounted in our `directory`, if it exists.

    A removal would empty the mounted directory, and then fail at the mount point. Other users may
    write to a target: a link under a run's name must not lead elsewhere. A path may lead elsewhere
    by now, so the id decides whether it is that mount.
    """
    try:
        with opened(directory, os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
            below = os.readlink(f"/proc/self/fd/{fd}")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return
    for mount in mounts_in(below):
        with opened(mount.mount_point, os.O_PATH | os.O_NOFOLLOW) as point:
            if mount_id_of(point) == mount.mount_id:
                linux.detach_mount(point)


class Target(Protocol):
    """Where the checkpoints of a run are stored."""

    @property
    def location(self) -> str:
        """The location as text, for the record."""

    @property
    def no_ceiling(self) -> str:
        """Why fio cannot measure a ceiling here; empty where it can."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Facts about this kind of target that change how a restore's figures are read."""

    def check(self) -> None:
        """Raise TargetError or UnavailableError unless the target is writable."""

    def free_bytes(self) -> int | None:
        """Return the bytes that a run may use; None where they are unknown."""

    def describe(self) -> tuple[Machine, Storage]:
        """Return (facts of the machine, facts of the storage), for the record."""

    def monitor(self) -> DeviceMonitor:
        """Return the counters of the device below the target."""

    def scratch(self) -> AbstractContextManager[Scratch]:
        """Return the run's own space; it is removed when the block ends, also on an error."""


@dataclass(frozen=True, kw_only=True)
class OpenTarget:
    """A target in use: the run's own space in it, and the counters of its storage.

    A trial uses its target only through this class, so one run can use several targets.
    """

    scratch: Scratch
    monitor: DeviceMonitor
    sampler: Sampler | None = None
    notes: tuple[str, ...] = ()
    """Facts about the target that change how a restore's figures are read."""
    instruments: Instruments | None = None
    """What the kernel shows of its files; None where there are no files."""
    patience: Patience = field(default_factory=Patience)

    @classmethod
    @contextmanager
    def of(
        cls, target: Target, patience: Patience | None = None, *, sampled: bool = True
    ) -> Iterator[OpenTarget]:
        """Yield `target` with a space of its own, which is removed at the end, and a sampler."""
        monitor = target.monitor()
        with target.scratch() as scratch, ExitStack() as undo:
            counts = sampled and bool(monitor.files)
            sampler = undo.enter_context(Sampler(monitor.files)) if counts else None
            found = cls.at(scratch, monitor)
            yield replace(
                found, sampler=sampler, notes=target.notes, patience=patience or found.patience
            )

    @classmethod
    def at(cls, scratch: Scratch, monitor: DeviceMonitor) -> OpenTarget:
        """Return the target of `scratch`, after a probe of what the kernel shows of files there."""
        directory = scratch.directory
        instruments = None if directory is None else Instruments.probe(directory, monitor)
        return cls(scratch=scratch, monitor=monitor, instruments=instruments)

    def inspect(
        self, name: str, files: Iterable[tuple[str, int]], changes: Changes | None = None
    ) -> Stored | None:
        """Inspect the files of the checkpoint `name`; None where there are no files.

        See `Instruments.inspect`.
        """
        if self.instruments is None or self.scratch.directory is None:
            return None
        return self.instruments.inspect(self.scratch.directory / name, files, changes)

    def cached_bytes(self, name: str) -> int | None:
        """Return the bytes of the files of the checkpoint `name` that are in the page cache.

        0 in a bucket, which has no files here. None where dirty pages cannot be counted either: on
        tmpfs, for example, all are there.
        """
        directory, instruments = self.scratch.directory, self.instruments
        if directory is None:
            return 0
        if instruments is None or instruments.unseen:
            return None
        return resident_bytes(FilesBelow(directory / name))[0]

    def make_cold(self, name: str) -> Cold:
        """Remove the checkpoint `name` from this machine's page cache, and count what remains."""
        if (directory := self.scratch.directory) is None:  # ranged GETs go to the server
            return EvictedFiles.cold([EvictedFiles(method="remote")])
        return make_cold(FilesBelow(directory / name))

    def settled(self) -> AbstractContextManager[None]:
        """Run a block, and return when earlier work has left the storage alone.

        In a bucket all requests are answered, and the server's own work cannot be seen.
        """
        if (directory := self.scratch.directory) is None:
            return nullcontext()
        return settled(directory, self.monitor, self.patience)
