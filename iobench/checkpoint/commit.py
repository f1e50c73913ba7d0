"""Committer: writes one checkpoint: its files, checksums at the same time, the manifest last."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.pacing import PacedImage
from iobench.checkpoint.persister import Snapshot
from iobench.checkpoint.recorded import recorded
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import FORMAT, Serialized
from iobench.checkpoint.staged import Staged
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import TransferError
from iobench.formats.collector import collector_paused
from iobench.units import GIB
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.local.reused_file import reusing

__all__ = ["Committer"]


_MANY, _SMALL = 5000, 2 * GIB
"""Pieces and bytes of a save without runs of the garbage collector: each would look at them all."""


class CommitLedger(Protocol):
    """What a commit needs of a Ledger."""

    def serial_of(self, save: Save) -> int:
        """Return the serial number that the checkpoint of `save` gets."""

    def holds(self, step: int) -> bool:
        """Return whether there is a checkpoint of `step`."""

    def committed(self, save: Save) -> None:
        """Record that `save` is durable and visible, then remove what retention drops."""


@dataclass(frozen=True, kw_only=True)
class Committer:
    """Writes checkpoints to `store` through `writer` and updates the ledger."""

    store: CheckpointStore
    writer: Writer
    ledger: CommitLedger
    decision: str = ""
    """Why it is written to this tier, for the manifest."""

    def commit(
        self,
        save: Save,
        serialized: Serialized,
        memory: Bytes | None = None,
        *,
        rate_bytes_per_s: int | None = None,
    ) -> Manifest:
        """Write the checkpoint, and return its manifest. On return it is durable and visible.

        The tensor file is in `memory`, or else in the trainer's own. `rate_bytes_per_s` limits the
        write rate. Raises TransferError, also if the writer reports that the files are not durable,
        and other errors of the writer. Then no part of the checkpoint is visible, and a checkpoint
        of the same step stays. When an older checkpoint cannot be removed after the commit, a
        RuntimeWarning says so.
        """
        takes_seconds = memory is None and not rate_bytes_per_s and serialized.size_bytes < _SMALL
        many = takes_seconds and len(serialized.structure.pieces) >= _MANY
        with collector_paused() if many else nullcontext():
            return self._commit(save, serialized, memory, rate_bytes_per_s)

    def _commit(
        self,
        save: Save,
        serialized: Serialized,
        memory: Bytes | None,
        rate_bytes_per_s: int | None,
    ) -> Manifest:
        save.status = "writing"
        image = serialized.image() if memory is None else serialized.image_in(memory)
        small, serial = [serialized.skeleton_image()], self.ledger.serial_of(save)
        small += self._more_files(save)
        replace, pieces = self.ledger.holds(save.step), serialized.structure.pieces
        by_block = self.writer.direct and not rate_bytes_per_s
        with self.store.staged(save.step, serial=serial, replace=replace) as staged:
            with (
                reusing(staged.directory, staged.spare, image.path),
                recorded(image, pieces, by_block=by_block) as recording,
            ):
                sent = recording.image
                if rate_bytes_per_s:
                    sent = PacedImage.over(sent, rate_bytes_per_s)
                save.transfer = self.writer.write_many(
                    [sent, *small], staged.directory, sync_directory=False
                )
            if not save.transfer.durable:
                raise TransferError(
                    f"step {save.step}: writer {self.writer.name!r} did not make its files "
                    "durable; the checkpoint is not committed"
                )
            others = [record_of(one, [("", one.size_bytes)]) for one in small]
            with collector_paused():
                manifest = self._manifest(save, (recording.record, *others), serial)
                listed = pieces.json(recording.digests.found)
                text = manifest.json_parts({image.path: listed})
            self._publish(staged, text)
            save.status = "committed"
            self.ledger.committed(save)
        return manifest

    def persist(self, snapshot: Snapshot[Serialized], *, rate_bytes_per_s: int | None) -> Manifest:
        """Commit a snapshot, and return its manifest; the callback of the persister."""
        return self.commit(
            snapshot.save, snapshot.content, snapshot.memory, rate_bytes_per_s=rate_bytes_per_s
        )

    def _publish(self, staged: Staged, manifest: list[bytes]) -> None:
        staged.publish(manifest)

    def _more_files(self, save: Save) -> list[FileImage]:
        """Return small files that belong to the checkpoint too."""
        del save
        return []

    def _described(self) -> dict[str, Any]:
        described = {"name": self.writer.name, "options": self.writer.options.to_dict()}
        return {**described, "placement": self.decision} if self.decision else described

    def _manifest(self, save: Save, files: tuple[FileRecord, ...], serial: int) -> Manifest:
        from iobench._version import __version__

        return Manifest(
            step=save.step,
            created_s=save.created_s,
            world_size=1,
            iobench=__version__,
            writer=self._described(),
            format=FORMAT,
            files=files,
            serial=serial,
        )
