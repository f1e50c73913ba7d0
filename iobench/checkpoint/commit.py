"""Committer: writes one checkpoint: its files, checksums at the same time, the manifest last."""

from __future__ import annotations

import time
from dataclasses import dataclass

from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.pacing import PacedImage
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import Serialized
from iobench.checkpoint.store import CheckpointStore
from iobench.writers.base import Writer
from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted
from iobench.writers.image import FileImage

__all__ = ["Committer"]


@dataclass(frozen=True, kw_only=True)
class Committer:
    """Writes checkpoints to `store` through `writer` and updates the ledger."""

    store: CheckpointStore
    writer: Writer
    ledger: Ledger

    def commit(
        self,
        save: Save,
        serialized: Serialized,
        image: FileImage,
        *,
        rate_bytes_per_s: int | None = None,
    ) -> None:
        """Write the checkpoint whose tensor file is `image`. On return it is durable and visible.

        `rate_bytes_per_s` limits the write rate. Raises TransferError and other errors of the
        writer. Then no part of the checkpoint is visible, and a checkpoint of the same step stays.
        When an older checkpoint cannot be removed after the commit, a RuntimeWarning says so.
        """
        began_s = time.perf_counter()
        save.status = "writing"
        skeleton = serialized.skeleton_image()
        sent = PacedImage.over(image, rate_bytes_per_s) if rate_bytes_per_s else image
        with self.store.staged(save.step, replace=self.ledger.holds(save.step)) as staged:
            checksums = _Checksums(image, serialized.pieces)
            try:
                save.transfer = self.writer.write_many(
                    [sent, skeleton], staged.directory, sync_directory=False
                )
            finally:
                checksums.join()
            files = (checksums.record, record_of(skeleton, [("", skeleton.size_bytes)]))
            staged.publish(self._manifest(save, files).to_dict())
            save.persist_s = time.perf_counter() - began_s
            save.status = "committed"
            self.ledger.committed(save)

    def _manifest(self, save: Save, files: tuple[FileRecord, ...]) -> Manifest:
        from iobench._version import __version__

        return Manifest(
            step=save.step,
            created_s=save.created_s,
            world_size=1,
            iobench=__version__,
            writer={"name": self.writer.name, "options": self.writer.options.to_dict()},
            format="safetensors",
            files=files,
            serial=self.ledger.next_serial,
        )


class _Checksums:
    """Computes the record of an image in a thread, while the writer waits for storage."""

    def __init__(self, image: FileImage, pieces: list[tuple[str, int]]) -> None:
        self._image, self._pieces = image, pieces
        self._record: FileRecord | None = None
        self._failure: BaseException | None = None
        self._thread = Worker(target=self._run, name="iobench-checksums")
        self._thread.start()

    @property
    def record(self) -> FileRecord:
        """The record. Raises what the thread raised."""
        if self._failure:
            raise self._failure
        assert self._record is not None
        return self._record

    def join(self) -> None:
        """Wait until the thread reads the image's memory no more. Ctrl-C does not end the wait."""
        uninterrupted(self._thread.join)

    def _run(self) -> None:
        try:
            self._record = record_of(self._image, self._pieces)
        except BaseException as error:  # noqa: BLE001 -- raised again by `record`
            self._failure = error
