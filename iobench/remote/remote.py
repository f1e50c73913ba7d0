"""Remote: the tier that outlives the node, a bucket or another directory.

GivenTiers: all tiers of a Checkpointer, checked and sorted.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.object_store import ObjectStore
from iobench.checkpoint.rate_limit import RateLimit
from iobench.checkpoint.retention import KeepAll, Retention
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import CheckpointStore, DirectoryStore, store_at
from iobench.errors import OptionError, UsageError
from iobench.remote.memory import Memory
from iobench.remote.remote_copy import (
    DRAINING_SUFFIX,
    DirectoryCopy,
    ObjectCopy,
    RemoteCopy,
)
from iobench.units import format_seconds, parse_seconds, parse_size
from iobench.writers.base import Writer
from iobench.writers.config import writer_of
from iobench.writers.file_writer import FileWriter
from iobench.writers.removal import remove_all, remove_entry, warn_of
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.target import is_s3

OnBacklog = Literal["wait", "drop"]


@dataclass(frozen=True)
class Remote:
    """The remote tier of a Checkpointer: checkpoints are copied to `location` in the background.

    - `location`: `s3://bucket/prefix`, or a directory of another file system
    - `keep`: which checkpoints stay there
    - `writer`: a Writer, or a text for `load_writer`, that copies and reads: "s3" for a bucket, and
      "hybrid" or another FileWriter for a directory
    - `bandwidth_limit`: bytes per second of all copies (`"500MiB"`)
    - `max_backlog`: how long a checkpoint may wait for its copy (`"10min"`)
    - `on_backlog`: past it, "drop" gives up the copies of the oldest checkpoints that wait, except
      that of the newest; "wait" makes the next save wait, as long as the remote tier answers. None:
      "drop", and "wait" with `every_save`
    - `every_save`: every checkpoint is copied, the oldest first, also one that `keep` would remove
      at once. Needs `on_backlog="wait"`

    Raises OptionError for values out of range.
    """

    location: str | Path
    keep: Retention = field(default_factory=KeepAll)
    writer: Writer | str = ""
    bandwidth_limit: int | str | None = None
    max_backlog: float | str = "1h"
    on_backlog: OnBacklog | None = None
    every_save: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.keep, Retention):
            raise OptionError(f"keep={self.keep!r}: takes a value such as KeepLast(3)")
        if self.on_backlog not in (None, *get_args(OnBacklog)):
            raise OptionError(f"on_backlog={self.on_backlog!r}: 'wait' or 'drop'")
        if self.every_save and self.past_backlog != "wait":
            raise OptionError(f"every_save: needs on_backlog='wait', not {self.on_backlog!r}")
        if self.rate_bytes_per_s == 0:
            raise OptionError("bandwidth_limit=0: must be at least 1 byte per second")
        if not self.max_backlog_s > 0:
            raise OptionError(f"max_backlog={self.max_backlog!r}: above 0 seconds")

    @property
    def rate_bytes_per_s(self) -> int | None:
        """Limit of all copies together; None: no limit."""
        limit = self.bandwidth_limit
        return None if limit is None else parse_size(limit, "bandwidth_limit")

    @property
    def past_backlog(self) -> OnBacklog:
        """What happens past the limit: `on_backlog`, or its default."""
        return self.on_backlog or ("wait" if self.every_save else "drop")

    @property
    def max_backlog_s(self) -> float:
        """How long a checkpoint may wait, in seconds."""
        return parse_seconds(self.max_backlog, "max_backlog")

    def new_writer(self) -> Writer:
        """Return the writer. Raises UsageError when it cannot write to the location."""
        usual = "s3" if is_s3(self.location) else "hybrid"
        writer = writer_of(self.writer or usual)
        if not isinstance(writer, S3Writer if is_s3(self.location) else FileWriter):
            raise UsageError(
                f"{self.location}: copies there continue what was sent in part, which writer "
                f"{writer.name!r} does not do; choose the writer {usual}"
            )
        return writer


AnyTier: TypeAlias = Memory | Remote


@dataclass(frozen=True, kw_only=True)
class GivenTiers:
    """Memory tiers, fastest first, and the remote one, if they were given."""

    memories: tuple[Memory, ...] = ()
    remote: Remote | None = None

    @classmethod
    def of(cls, tiers: Sequence[AnyTier]) -> GivenTiers:
        """Sort `tiers`. Raises OptionError for anything else, another order, or two remote ones."""
        if not isinstance(tiers, Sequence) or not all(isinstance(one, AnyTier) for one in tiers):
            raise OptionError(
                f'tiers={tiers!r}: takes a list such as [Memory("8GiB"), Remote("s3://bucket/run")]'
            )
        memories = [one for one in tiers if isinstance(one, Memory)]
        remote = [one for one in tiers if isinstance(one, Remote)]
        if [*memories, *remote[:1]] != [*tiers]:
            raise OptionError("tiers: the order is Memory, Remote, with one remote tier at most")
        names = [str(one) for one in memories]
        if len(set(names)) < len(names):
            raise OptionError(f"tiers: the same memory twice: {', '.join(names)}")
        return cls(memories=tuple(memories), remote=remote[0] if remote else None)

    def check(self, options: Mapping[str, Any], *, ranked: bool) -> None:
        """Raise OptionError if a Checkpointer with `options` cannot use them."""
        if ranked and options.get("placement") and options.get("replicate"):
            raise OptionError("placement: not with replicate in a job of several ranks")
        for name in ("slots", "budget"):
            if self.memories and options.get(name) is not None:
                raise OptionError(f"{name}: the sizes of the Memory tiers decide; leave it out")


class RemoteTier:
    """The checkpoints of a run in its remote tier. `open` comes first.

    The thread of the drain writes; a restore may read at the same time.
    """

    def __init__(self, options: Remote) -> None:
        self.options = options
        self._begin()
        self._ledger: Ledger | None = None
        self.alone = threading.RLock()
        """While a copy is published: no direct save is written, and none begins."""

    def _begin(self) -> None:
        self.writer = writer = self.options.new_writer()
        self.store: CheckpointStore = store_at(self.options.location, writer)
        self.direct_writer = S3Writer(writer.options) if isinstance(writer, S3Writer) else writer
        """For saves that go here directly: in a bucket with connections of its own."""

    def __str__(self) -> str:
        return str(self.store)

    def check(self, local: Path) -> None:
        """Raise OptionError when it is the directory of the local checkpoints."""
        store = self.store
        if isinstance(store, DirectoryStore) and store.directory.resolve() == local.resolve():
            raise OptionError(f"{local}: the remote tier must be another directory")

    def open(self, waiting: Collection[int]) -> dict[int, int]:
        """Take the lock of a directory, and return the serial numbers by step.

        Removes unfinished copies of other steps than `waiting`. Raises TransferError, TargetError.
        """
        with self.alone:
            self.store.acquire()
            try:
                if isinstance(self.store, DirectoryStore):
                    self.store.clean()
                ledger = Ledger(self.store, self.options.keep)
                serials = ledger.serials()
                self.tidy(waiting)
            except BaseException:
                self.store.release()
                raise
            self._ledger = ledger
            return serials

    def renew(self) -> None:
        """Begin anew after a failure: credentials may have expired, a mount may be another one.

        A writer that the user made stays.
        """
        with self.alone:
            self.close()
            if isinstance(self.options.writer, str):
                self._begin()

    @property
    def is_open(self) -> bool:
        """Whether `open` has succeeded since the last `renew`."""
        return self._ledger is not None

    def tidy(self, waiting: Collection[int]) -> None:
        """Remove unfinished copies of other steps than `waiting`. Raises TransferError."""
        with self.alone:
            if isinstance(self.store, ObjectStore):
                self.store.clean(waiting)
                return
            assert isinstance(self.store, DirectoryStore)
            found = self.store.directory.glob(f".step-*{DRAINING_SUFFIX}")
            begins = tuple(f".step-{step}." for step in waiting)
            left = [path for path in found if not path.name.startswith(begins)]
            warn_of(remove_all({path: partial(remove_entry, path) for path in left}).values())

    def place(self, step: int) -> str | Path:
        """Return where the copy of a step is, which has begun or begins now; see `copy`."""
        store = self.store
        return store.unfinished(step) if isinstance(store, ObjectStore) else store.locate(step)

    def copy(self, place: str | Path, serial: int, limit: RateLimit) -> RemoteCopy:
        """Return the copy at `place`. It need not be open, except to publish a copy."""
        if isinstance(self.writer, S3Writer):  # see Remote.new_writer
            return ObjectCopy(str(place), self.writer, serial=serial, limit=limit)
        assert isinstance(self.writer, FileWriter)
        assert isinstance(self.store, DirectoryStore)
        lock = self.store.lock
        return DirectoryCopy(Path(place), self.writer, serial=serial, limit=limit, lock=lock)

    def would_keep(self, waiting: Mapping[int, tuple[int, float]]) -> set[int]:
        """Return the steps of `waiting` that the retention of this tier would keep.

        It never asks the tier: all of them when its contents are unknown.
        """
        ledger = self._ledger
        known = ledger is not None and ledger.is_read
        return ledger.would_keep(waiting) if ledger is not None and known else set(waiting)

    def holds(self, step: int) -> bool:
        """Return whether there is a checkpoint of `step`, as far as this process knows."""
        ledger = self._ledger  # once: another thread may close the tier
        return ledger is not None and ledger.holds(step)

    @contextmanager
    def using(self, limit_s: float | None, where: str) -> Iterator[Writer]:
        """Yield the writer for a checkpoint that is written to `where` here directly.

        It stays the writer inside the `with`, for every rank of a job. Copies of other checkpoints
        go on; one that is complete is published afterwards. What fails leaves its objects to
        `tidy`, so that the save is written elsewhere without another wait. After `limit_s` seconds
        all requests to a bucket end, and TransferError is raised; None: no limit.
        """
        writer = self.direct_writer
        with self.alone, ExitStack() as stack:
            if isinstance(writer, S3Writer):
                late = (
                    f"{where}: not written within {format_seconds(limit_s or 0.0)}, the expected "
                    "time and that of a local save together"
                )
                stack.enter_context(writer.client.time_limit.within(limit_s, late))
            yield writer

    def published(self, manifest: Manifest, waiting: Collection[int]) -> None:
        """Record a new checkpoint, then remove what retention drops and what it replaced."""
        with self.alone:
            if isinstance(self.store, ObjectStore) and self.holds(manifest.step):
                self.store.clean(waiting)
            self.recorded(manifest.step, manifest.serial, manifest.created_s, manifest.size_bytes)

    def recorded(self, step: int, serial: int, created_s: float, size_bytes: int) -> None:
        """Record a new checkpoint, then remove what retention drops."""
        assert self._ledger is not None
        self.store.steps()  # a bucket learns the prefix of the step
        self._ledger.seen(serial)
        save = Save(step=step, status="committed", created_s=created_s, size_bytes=size_bytes)
        self._ledger.committed(save, serial)

    def remove(self, step: int) -> None:
        """Remove the checkpoint of `step` and unfinished copies of it, if there are any."""
        with self.alone:  # the drain's thread may begin anew meanwhile
            if self._ledger is not None and self._ledger.holds(step):
                self._ledger.remove(step)
            elif step in self.store.steps():
                self.store.remove(step)

    def close(self) -> None:
        """Release the lock of a directory, close the connections to a bucket."""
        with self.alone:
            self._ledger = None
            self.store.release()
            if self.direct_writer is not self.writer:
                self.direct_writer.close()
            if isinstance(self.options.writer, str):
                self.writer.close()
