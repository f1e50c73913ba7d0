"""BatchSync: makes many files durable in the background, while the caller writes others."""

from __future__ import annotations

from collections.abc import Sequence

from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.local.new_file import NewFile
from iobench.writers.transfer import Meter

__all__ = ["BatchSync"]

_SYNCS = 8  # concurrent fsyncs; measured in docs/decisions/0020


class BatchSync:
    """Syncs batches of files in the background. The caller owns the files.

    The first sync makes most data and metadata of the other files durable too. Concurrent syncs
    share the rest: one commit of the journal, one flush of the device.

    The thread ends with its batch, so that no interrupt of the caller can leave it behind.
    """

    def __init__(self) -> None:
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
        self._channel.submit(Lease(files))

    def wait(self) -> None:
        """Wait until the batch is durable. Raises the first failure, a TransferError."""
        self._channel.drain()

    def end(self) -> None:
        """Wait until no thread uses the files; raise interrupts after that."""
        self._channel.close()

    def _sync(self, files: Sequence[NewFile]) -> None:
        for one in map_in_workers(_SYNCS, _synced, files):
            self.meter.add(one, {})


def _synced(file: NewFile) -> Meter:
    meter = Meter()  # of its own: the caller's meter counts the time that the caller waits
    file.sync(meter)
    return meter
