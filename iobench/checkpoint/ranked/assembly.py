"""Assembly: rank 0 looks at the parts of all ranks, and makes a checkpoint of them."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.ranked.index import INDEX, METADATA, Indexer
from iobench.checkpoint.ranked.merge import merged
from iobench.checkpoint.ranked.part import Part, part_file
from iobench.checkpoint.ranked.plan import RankPlan
from iobench.checkpoint.save import Save
from iobench.checkpoint.staged import Staged
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import DataMismatchError, TargetError, TransferError
from iobench.formats.collector import collector_paused
from iobench.ranks.world import World
from iobench.writers.base import Writer
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.image import FileImage

__all__ = ["FORMAT", "Assembly"]

FORMAT = "dcp"
"""Of the files of a checkpoint that several ranks saved."""

_READERS = 8


@dataclass(kw_only=True)
class Assembly:
    """Makes checkpoints in `store`; `hosts` are those of the ranks."""

    store: CheckpointStore
    writer: Writer
    world: World
    hosts: Sequence[str]
    _indexer: tuple[RankPlan, Indexer] | None = field(default=None, init=False)

    def publish(
        self,
        save: Save,
        plan: RankPlan,
        staged: Staged,
        checksums: Sequence[str],
        serial: int,
        attempt: str,
        decision: str = "",
    ) -> Manifest:
        """Commit the parts in `staged`, whose part manifests have these checksums.

        `decision` says why they are in this tier. Returns the manifest.
        Raises TargetError for a part that rank 0 cannot see, DataMismatchError for one that
        differs, and TransferError. Then there is no checkpoint.
        """
        numbers = range(len(checksums))
        parts = map_in_workers(
            _READERS, lambda rank: self._part(staged.directory, rank, checksums[rank]), numbers
        )
        with collector_paused():
            skeleton = merged(parts)
            indexer = self._indexer_of(plan)
            where = os.fspath(self.store.locate(save.step))
            images = [
                FileImage.of(METADATA, [indexer.metadata(parts, skeleton, where)]),
                FileImage.of(INDEX, [indexer.index(skeleton).encode()]),
            ]
        self.writer.write_many(images, staged.directory, sync_directory=False)
        staged.remove(map(part_file, numbers))
        records = [record_of(image, [("", image.size_bytes)]) for image in images]
        files = (*(part.file for part in parts), *records)
        manifest = self._manifest(save, files, serial, attempt, decision)
        staged.publish([manifest.to_json()])
        return manifest

    def table(self, plan: RankPlan) -> str:
        """Return the part of the index that has the tensors of all ranks, as JSON."""
        return self._indexer_of(plan).table

    def _part(self, directory: str | Path, rank: int, checksum: str) -> Part:
        """Return the part of a rank, after a look at all of its files."""
        where = f"{directory}/{part_file(rank)}"
        try:
            with closing(self.writer.open_source(where)) as source:
                part = Part.parse(source.read(-1), checksum, where)
            file = part.file
            with closing(self.writer.open_source(f"{directory}/{file.path}")) as source:
                size = source.seek(0, io.SEEK_END)
        except TransferError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            raise TargetError(
                f"rank {rank} on host {self.hosts[rank]} wrote its part of {directory}, but rank 0 "
                f"on host {self.world.host} does not see it; all ranks need the same directory: "
                "choose one that all nodes share"
            ) from error
        if size != file.size_bytes:
            raise DataMismatchError(
                f"{directory}/{file.path}: has {size} bytes, rank {rank} on host "
                f"{self.hosts[rank]} wrote {file.size_bytes}"
            )
        return part

    def _indexer_of(self, plan: RankPlan) -> Indexer:
        if self._indexer is None or self._indexer[0] is not plan:
            assert plan.whole is not None  # this is rank 0
            self._indexer = plan, Indexer(plan.whole)
        return self._indexer[1]

    def _manifest(
        self,
        save: Save,
        files: tuple[FileRecord, ...],
        serial: int,
        attempt: str,
        decision: str,
    ) -> Manifest:
        from iobench._version import __version__

        writer = {"name": self.writer.name, "options": self.writer.options.to_dict()}
        return Manifest(
            step=save.step,
            created_s=save.created_s,
            world_size=self.world.size,
            iobench=__version__,
            writer={**writer, "placement": decision} if decision else writer,
            format=FORMAT,
            files=files,
            serial=serial,
            attempt=attempt,
        )
