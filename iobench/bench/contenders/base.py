"""Contender: something that saves a replay's state durably and restores it; what a run compares.

Our writers are contenders, and so are peers: other projects' ways to save, named `peer:NAME`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from iobench.bench.data.replay import Replay
from iobench.bench.targets.base import Location
from iobench.peers.base import Peer
from iobench.ranks.exchange import Reader
from iobench.ranks.restore_plan import RestoreMode
from iobench.results.records import Verified
from iobench.writers.base import Writer
from iobench.writers.transfer import Transfer

_FRESH = "with peers, restores go to new memory that is allocated inside the clock"


class Contender(ABC):
    """Saves and restores replays in one way. Only `save` and `restore` are timed."""

    saves = True
    """False for a contender that only restores: another writer makes its save, which is not
    reported."""
    stores = True
    """False for a contender that stores nothing and only measures the harness."""
    is_peer = False
    """Whether it belongs to another project."""
    maps_files = False
    """Whether it maps the files that it saves or restores (see `OperationMemory`)."""
    fresh = False
    """Whether a restore allocates the memory of its tensors."""
    restore_mode: RestoreMode | None = None
    """The only mode in which it restores with other ranks; None: all."""

    def __init__(self, by: Writer | Peer, name: str) -> None:
        self._by, self.name = by, name
        self.kept_bytes = 0
        """Memory that it keeps for its next operation, by `OperationMemory`."""

    @property
    def options(self) -> Mapping[str, Any]:
        """All its options, as plain values."""
        return self._by.options.to_dict()

    @property
    def label(self) -> str:
        """The name and the options that differ from their defaults, in the syntax of `--writer`."""
        return ",".join([self.name, *self._by.options.changed()])

    def check_scheme(self, target: Location) -> None:
        """Raise UsageError for a kind of target that it does not accept."""
        self._by.check_scheme(target)

    def require(self, target: Location) -> None:
        """Raise UnavailableError, with reason and remedy, unless it works in `target`."""
        self._by.require(target)

    @abstractmethod
    def save(self, replay: Replay, directory: Location) -> Transfer:
        """Save every file of the replay. Each is durable, except for its directory entry."""

    @abstractmethod
    def restore(self, replay: Replay, directory: Location) -> Transfer:
        """Restore every file."""

    @abstractmethod
    def verify(self, replay: Replay, directory: Location) -> Verified:
        """Compare the restored tensors with the saved ones, and free them."""

    def join(self) -> None:  # noqa: B027 -- optional
        """Connect with the other ranks, which call it too."""

    def leave(self) -> None:  # noqa: B027 -- optional
        """End what `join` began."""

    def warm_up(self, directory: Location) -> None:  # noqa: B027 -- optional
        """Do the work of the first use in a process, such as imports; may use `directory`."""

    def notes(self, replay: Replay) -> tuple[str, ...]:
        """Return notes for readers of its figures."""
        del replay
        return ()


class WriterContender(Contender):
    """One of our writers, with the formats of the replay's files."""

    def __init__(self, writer: Writer, *, fresh: bool = False) -> None:
        """With `fresh`, restores allocate new memory inside the clock, like those of peers.

        Otherwise restores go to the replay's memory, which is allocated already.
        """
        super().__init__(writer, writer.name)
        self.writer, self.fresh = writer, fresh
        self.stores = writer.stores

    def save(self, replay: Replay, directory: Location) -> Transfer:
        return replay.save(self.writer, directory)

    def restore(
        self, replay: Replay, directory: Location, reader: Reader | None = None
    ) -> Transfer:
        """Restore every file; with `reader` together with the other ranks."""
        return replay.restore(self.writer, directory, reader, fresh=self.fresh)

    def verify(self, replay: Replay, directory: Location) -> Verified:
        return replay.verify(self.writer, directory)

    def notes(self, replay: Replay) -> tuple[str, ...]:
        return (*replay.notes, *((_FRESH,) if self.fresh else ()))
