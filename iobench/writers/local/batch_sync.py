"""BatchSync: makes many files durable in the background, while the caller writes others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iobench.errors import TransferError
from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.local.fsync_ring import SyncRing
from iobench.writers.local.new_file import NewFile
from iobench.writers.transfer import Meter

__all__ = ["BatchSync"]

_SYNCS = 8  # concurrent fsyncs in threads of this process


class BatchSync:
    """Syncs batches of files in the background. The caller owns the files.

    The first sync makes most data and metadata of the other files durable too. Concurrent syncs
    share the rest: one commit of the journal, one flush of the device. They run in threads of the
    kernel if `make_ring` returns a ring, and else in threads of this process. It is called for the
    first batch of more than one file: a single one is synced as fast without.

    The thread ends with its batch, so that no interrupt of the caller can leave it behind.
    """

    def __init__(self, make_ring: Callable[[], SyncRing | None] = lambda: None) -> None:
        self._make_ring: Callable[[], SyncRing | None] | None = make_ring
        self._ring: SyncRing | None = None
        self.meter = Meter()
        """Latencies of the syncs; its seconds are not those of the caller, who waits for them.

        It belongs to the thread of the batch, and to the caller once that has ended.
        """
        self._channel: Channel[Sequence[NewFile]] = Channel(
            lambda: self._channel.serve(self._sync),
            name="iobench-sync",
            lingers=False,
            daemon=False,
        )

    def begin(self, files: Sequence[NewFile]) -> None:
        """Start to sync `files`. The caller has waited for the batch before."""
        if self._make_ring is not None and len(files) > 1:
            self._ring, self._make_ring = self._make_ring(), None
        self._channel.submit(Lease(files))

    def wait(self) -> None:
        """Wait until the batch is durable. Raises the first failure, a TransferError."""
        self._channel.drain()

    def end(self) -> None:
        """Wait until no thread uses the files; raise interrupts after that."""
        try:
            self._channel.close()
        finally:
            if self._ring is not None:
                self._ring.close()

    def _sync(self, files: Sequence[NewFile]) -> None:
        if self._ring is None:
            for one in _sync_by_threads(files):
                self.meter.add(one, {})
        else:
            with self.meter.operation("batch sync"):
                _sync_by(self._ring, files)


def _sync_by(ring: SyncRing, files: Sequence[NewFile]) -> None:
    failed = ring.sync([file.fd for file in files])
    if failed:
        (first, error), *others = sorted(failed.items())
        failure = TransferError.wrap(error, "syncing", files[first].path)
        for number, other in others:
            failure.add_note(f"so did {files[number].path}: {other.strerror}")
        raise failure from error


def _sync_by_threads(files: Sequence[NewFile]) -> list[Meter]:
    return map_in_workers(_SYNCS, _synced, files)


def _synced(file: NewFile) -> Meter:
    meter = Meter()  # of its own: the caller's meter counts the time that the caller waits
    file.sync(meter)
    return meter
