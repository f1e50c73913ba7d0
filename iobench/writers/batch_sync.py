"""BatchSync: makes files durable from several threads while the caller goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from iobench.errors import TransferError
from iobench.writers.files import NewFile
from iobench.writers.sync_ring import SyncRing
from iobench.writers.transfer import Meter
from iobench.writers.workers import Blocks, run_workers

__all__ = ["BatchSync"]

_SYNCS = 8  # side by side, by our threads


class BatchSync:
    """Syncs `files` in the background once started; they stay the caller's, to publish or abandon.

    The first sync makes most of the others' data and metadata durable too, and syncs that run
    side by side share what is left: one commit of the journal, one flush of the device. They run
    in the kernel's threads where there is a `ring`, which no other batch may use meanwhile; in ours
    otherwise.
    """

    def __init__(self, files: Sequence[NewFile], ring: SyncRing | None = None) -> None:
        self.files, self._ring = files, ring
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="iobench-sync")

    def start(self) -> None:
        """Begin. Apart from the constructor, so that an interrupt here finds who can `end`."""
        self._thread.start()

    def wait(self) -> None:
        """Wait until all are durable. Raises the first sync's failure, TransferError."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Wait until no thread uses the files; KeyboardInterrupt is raised then."""
        interrupt: KeyboardInterrupt | None = None
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _run(self) -> None:
        try:
            if self._ring is None:
                self._sync_by_threads()
            else:
                self._sync_by(self._ring)
        except BaseException as error:  # noqa: BLE001 -- raised by wait
            self._failure = error

    def _sync_by(self, ring: SyncRing) -> None:
        failed = ring.sync([file.fd for file in self.files])
        if failed:
            (first, error), *others = sorted(failed.items())
            failure = TransferError.wrap(error, "syncing", self.files[first].path)
            for number, other in others:
                failure.add_note(f"so did {self.files[number].path}: {other.strerror}")
            raise failure from error

    def _sync_by_threads(self) -> None:
        def sync(numbers: Blocks, own: Meter) -> None:
            for number, _ in numbers:
                self.files[number].sync(own)

        numbers = Blocks(0, len(self.files), 1)
        # the caller's clock counts what it waited for
        run_workers(min(_SYNCS, len(self.files)), numbers, sync, Meter())
