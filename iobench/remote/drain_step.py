"""DrainStep: copies one checkpoint to the remote tier, and reads it back."""

from __future__ import annotations

from dataclasses import dataclass

from iobench.checkpoint.manifest import MANIFEST, Manifest
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import DataMismatchError
from iobench.regular_file import read_regular
from iobench.remote.file_copier import FileCopier
from iobench.remote.queue import NOT_DURABLE, DrainQueue, Queued
from iobench.remote.remote import RemoteTier
from iobench.remote.source_file import LocalDamageError

__all__ = ["DrainStep"]


@dataclass(frozen=True, kw_only=True)
class DrainStep:
    """The work on one checkpoint; the queue says what its state is."""

    local: DirectoryStore
    remote: RemoteTier
    queue: DrainQueue
    copier: FileCopier

    def send(self, entry: Queued, *, again: bool) -> int | None:
        """Copy a checkpoint. It is durable in the remote tier on return; the state says so.

        Returns the bytes sent by this attempt; None if its step was removed or saved anew
        meanwhile, or the copy was given up. `again`: an earlier attempt failed, so the remote tier
        may have it all. Raises LocalDamageError, TransferError, StoppedError.
        """
        if not self.queue.move(entry, "draining", of=NOT_DURABLE):
            return None
        self.copier.limit.begin()
        found = self._manifest(entry)
        if found is None:
            return None
        manifest, text = found
        place, sent = None, 0
        if not (again and self.remote.has(manifest)):
            place = self.remote.place(entry.step)
            sent = self.copier.send(
                entry.step, entry.serial, place, manifest.files, manifest.pinned
            )
        with self.remote.alone():  # no direct save of this step is written or begins meanwhile
            # A copy that was given up on the way may have bytes of a later generation of the
            # optimizer: its pin is free then. One that is given up from here on is right, and may
            # replace what retention drops.
            if not self.queue.has(entry, ["draining"]):
                return None
            if place is not None:
                self.remote.copy(place, entry.serial, self.copier.limit).publish(text)
            self.remote.published(manifest, [one.step for one in self.queue.not_durable()])
            if not self.queue.move(entry, "durable", of=["draining"]):
                if not self.queue.has(entry, ["superseded"]):  # removed or saved anew
                    self.remote.remove(entry.step)
                return None
        return sent

    def verify(self, entry: Queued) -> bool:
        """Read the remote copy back. False: it is no longer there, or was given up meanwhile.

        Raises LocalDamageError when it is not right and the local files are not either: it stays,
        and a restore mends each of the two with pieces of the other one. Raises DataMismatchError
        when only the remote copy is wrong; it is removed, and will be sent again. Raises
        TransferError.
        """
        remote = self.remote
        self.copier.limit.begin()
        if not remote.holds(entry.step):
            self.queue.move(entry, "superseded", of=["durable"])
            return False
        try:
            found = self._manifest(entry)
            manifest = found[0] if found else None
        except LocalDamageError:  # of the local copy alone
            manifest = remote.store.manifest(entry.step)
        if manifest is None or manifest.serial != entry.serial:
            self.queue.move(entry, "superseded", of=["durable"])
            return False
        try:
            where = remote.store.locate(entry.step)
            self.copier.read_back(where, manifest.remote_files)
        except DataMismatchError as error:
            self._check_local(entry, manifest, error)
            with remote.alone():
                # False: it was a later save of this step, or the local files may be gone by now.
                if not self.queue.move(entry, "waiting", of=["durable"]):
                    return False
                remote.remove(entry.step)
            raise
        return self.queue.move(entry, "verified", of=["durable"])

    def _manifest(self, entry: Queued) -> tuple[Manifest, bytes] | None:
        """Return the local manifest and its text; None if it is that of a later save."""
        path = self.local.locate(entry.step) / MANIFEST
        try:
            text = read_regular(path)
            manifest = Manifest.parse(text, str(path))
        except (DataMismatchError, OSError) as error:
            raise LocalDamageError(str(error)) from error
        return (manifest, text) if manifest.serial == entry.serial else None

    def _check_local(self, entry: Queued, manifest: Manifest, error: DataMismatchError) -> None:
        """Raise LocalDamageError if the local files are the reason for `error`."""
        try:
            self.copier.compare_local(entry.step, manifest.files, manifest.pinned)
        except (DataMismatchError, OSError) as damage:
            raise LocalDamageError(str(damage)) from error
