"""DrainStep: copies one checkpoint to the remote tier, and reads it back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.pinned_state import PinnedState
from iobench.checkpoint.staged import MANIFEST
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import DataMismatchError
from iobench.tiers.file_copier import FileCopier
from iobench.tiers.queue import DrainQueue, Queued
from iobench.tiers.read_back import compare_file, read_back
from iobench.tiers.remote import RemoteTier
from iobench.tiers.source_file import LocalDamageError, SourceFile
from iobench.writers.image import Bytes
from iobench.writers.source import LocalSource

__all__ = ["DrainStep"]


@dataclass(frozen=True, kw_only=True)
class DrainStep:
    """The work on one checkpoint; the queue says what its state is."""

    local: DirectoryStore
    remote: RemoteTier
    offload: Callable[[], PinnedState | None]
    queue: DrainQueue
    copier: FileCopier

    def send(self, entry: Queued, *, again: bool) -> int | None:
        """Copy a checkpoint. It is durable in the remote tier on return; the state says so.

        Returns the bytes sent by this attempt; None if its step was removed or saved anew
        meanwhile. `again`: an earlier attempt failed, so the remote tier may have it all. Raises
        LocalDamageError, TransferError, DrainStoppedError.
        """
        self.queue.move(entry, "draining")
        self.copier.pace.begin()
        found = self._manifest(entry)
        if found is None:
            return None
        manifest, text = found
        sent = 0
        if not (again and self.remote.has(manifest)):
            place = self.remote.place(entry.step)
            sent = self.copier.send(entry.step, entry.serial, place, manifest.files)
            copy = self.remote.copy(place, entry.serial, self.copier.pace)
            for _, source in self._pinned(manifest):
                with source:
                    sent += copy.send(source)
            copy.publish(text)
        self.remote.published(manifest, [one.step for one in self.queue.not_durable()])
        if not self.queue.move(entry, "durable"):
            self.remote.remove(entry.step)
            return None
        return sent

    def verify(self, entry: Queued) -> bool:
        """Read the remote copy back. False: it is no longer there.

        Raises LocalDamageError when it is not right because the local files are not; it is removed
        then. Raises DataMismatchError when only the remote copy is wrong; it is removed too, and
        will be sent again. Raises TransferError.
        """
        remote = self.remote
        self.copier.pace.begin()
        if not remote.holds(entry.step):
            self.queue.move(entry, "superseded")
            return False
        try:
            found = self._manifest(entry)
            manifest = found[0] if found else None
        except LocalDamageError:  # of the local copy alone
            manifest = remote.store.manifest(entry.step)
        if manifest is None or manifest.serial != entry.serial:
            self.queue.move(entry, "superseded")
            return False
        try:
            where = remote.store.locate(entry.step)
            self.copier.read_back(where, manifest.remote_files)
        except DataMismatchError as error:
            remote.remove(entry.step)
            self._check_local(entry, manifest, error)
            self.queue.move(entry, "waiting")
            raise
        self.queue.move(entry, "verified")
        return True

    def _manifest(self, entry: Queued) -> tuple[Manifest, bytes] | None:
        """Return the local manifest and its text; None if it is that of a later save."""
        path = self.local.locate(entry.step) / MANIFEST
        try:
            text = path.read_bytes()
            manifest = Manifest.parse(text, str(path))
        except (DataMismatchError, OSError) as error:
            raise LocalDamageError(str(error)) from error
        return (manifest, text) if manifest.serial == entry.serial else None

    def _check_local(self, entry: Queued, manifest: Manifest, error: DataMismatchError) -> None:
        """Raise LocalDamageError if the local files are the reason for `error`."""
        where = str(self.local.locate(entry.step))
        try:
            read_back(manifest.files, where, LocalSource, self.copier.pace.wait)
            for record, source in self._pinned(manifest):
                with source:
                    compare_file(record, self._paced(source), os.path.join(where, record.path))
        except (DataMismatchError, OSError) as damage:
            raise LocalDamageError(str(damage)) from error

    def _pinned(self, manifest: Manifest) -> Iterator[tuple[FileRecord, SourceFile]]:
        """Open the files of the pinned generation of a checkpoint."""
        state = self.offload()
        for pinned in manifest.pinned:
            for record in pinned.files:
                if state is None:
                    raise LocalDamageError(f"step {manifest.step}: its optimizer is not open")
                yield record, state.open_file(pinned, record)

    def _paced(self, source: SourceFile) -> Iterator[Bytes]:
        for block in source.blocks():
            self.copier.pace.wait(len(block))
            yield block
