"""Target: where a run stores its checkpoints: a directory, or a prefix in a bucket.

What differs between them is behind these two interfaces; the runner and its trials know neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from iobench.bench.counters.monitor import Monitor
from iobench.bench.counters.sampler import Sampler
from iobench.bench.targets.instruments import Instruments
from iobench.checkpoint.staged import Staged
from iobench.results.records import Cold, Stored

__all__ = ["Location", "OpenTarget", "Scratch", "Target"]

Location = str | Path
"""What a writer is given: a directory, or `s3://bucket/prefix`."""


class Scratch(Protocol):
    """The run's own space in its target: empty at first, removed at the end."""

    @property
    def directory(self) -> Path | None:
        """The same as a directory, where it is one."""

    def locate(self, name: str) -> Location:
        """Where the published checkpoint `name` is."""

    def staged(self, name: str) -> AbstractContextManager[Staged]:
        """The new checkpoint `name`; removed when the block is left without `publish`."""

    def instruments(self, monitor: Monitor) -> Instruments | None:
        """What the kernel shows of files here, found by a probe; None where there are no files."""

    def make_cold(self, name: str) -> Cold:
        """Remove the checkpoint `name` from this machine's page cache, and count what remains."""

    def remove(self, name: str) -> None:
        """Remove the checkpoint `name`, if there is one."""

    def settle(self, monitor: Monitor) -> None:
        """Wait until earlier work has left the storage alone."""


class Target(Protocol):
    """Where the checkpoints of a run are stored."""

    @property
    def location(self) -> str:
        """As the record shows it."""

    @property
    def no_ceiling(self) -> str:
        """Why fio cannot measure a ceiling here; empty where it can."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of a restore's figure must know of this kind of target."""

    def check(self) -> None:
        """Raise TargetError or UnavailableError unless it can be written."""

    def free_bytes(self) -> int | None:
        """Bytes that a run may use; None where that is unknown."""

    def describe(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(facts of the machine, facts of the storage), for the record."""

    def monitor(self) -> Monitor:
        """The counters of the device below it."""

    def scratch(self) -> AbstractContextManager[Scratch]:
        """The run's own space; removed at the end, also after an error."""


@dataclass(frozen=True, kw_only=True)
class OpenTarget:
    """A target in use: the run's own place in it and the counters of its storage.

    Trials know their target by this alone, so that one run can use several targets.
    """

    scratch: Scratch
    monitor: Monitor
    sampler: Sampler | None = None
    notes: tuple[str, ...] = ()
    """What a reader of a restore must know of the target."""
    instruments: Instruments | None = None
    """What the kernel shows of its files; None where there are none."""

    def inspect(self, name: str, files: Mapping[str, int]) -> Stored | None:
        """Look at the files of the checkpoint `name`; None where there are none."""
        if self.instruments is None or self.scratch.directory is None:
            return None
        return self.instruments.inspect(self.scratch.directory / name, files)

    def settle(self) -> None:
        """Wait until earlier work has left the storage alone."""
        self.scratch.settle(self.monitor)
