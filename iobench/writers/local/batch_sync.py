"""BatchSync: makes files durable in the background, many at once, while the caller goes on."""

from __future__ import annotations

from collections.abc import Sequence

from iobench.errors import TransferError
from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.local.fsync_ring import SyncRing
from iobench.writers.local.new_file import NewFile
from iobench.writers.transfer import Meter

__all__ = ["BatchSync"]

_SYNCS = 8  # side by side, by our threads


class BatchSync:
    """Syncs batch after batch of files in the background; they stay the caller's.

    The first sync makes most of the others' data and metadata durable too, and syncs that run
    side by side share what is left: one commit of the journal, one flush of the device. They run
    in the kernel's threads where there is a `ring`, in ours otherwise. All batches are one
    thread's: with each thread that uses a ring the kernel's begin and end.
    """

    def __init__(self, ring: SyncRing | None = None) -> None:
        self._ring = ring
        self._channel: Channel[Sequence[NewFile]] = Channel(
            lambda: self._channel.serve(self._sync), name="iobench-sync", daemon=False
        )

    def begin(self, files: Sequence[NewFile]) -> None:
        """Begin to sync `files`. Those before have been waited for."""
        self._channel.submit(Lease(files))

    def wait(self) -> None:
        """Wait until the files last begun are durable. Raises the first failure, TransferError."""
        self._channel.drain()

    def end(self) -> None:
        """Wait until no thread uses the files; interrupts are raised then."""
        self._channel.close()

    def _sync(self, files: Sequence[NewFile]) -> None:
        if self._ring is None:
            _sync_by_threads(files)
        else:
            _sync_by(self._ring, files)


def _sync_by(ring: SyncRing, files: Sequence[NewFile]) -> None:
    failed = ring.sync([file.fd for file in files])
    if failed:
        (first, error), *others = sorted(failed.items())
        failure = TransferError.wrap(error, "syncing", files[first].path)
        for number, other in others:
            failure.add_note(f"so did {files[number].path}: {other.strerror}")
        raise failure from error


def _sync_by_threads(files: Sequence[NewFile]) -> None:
    def sync(numbers: Blocks, own: Meter) -> None:
        for number, _ in numbers:
            files[number].sync(own)

    # the caller's clock counts what it waited for
    run_workers(min(_SYNCS, len(files)), Blocks(0, len(files), 1), sync, Meter())
