"""DcpFormat: the files of a checkpoint of several ranks, which stock DCP reads too.

Each rank writes one file, and a part manifest for rank 0. Rank 0 looks at all of them, and adds the
index.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.pieces import Pieces
from iobench.checkpoint.place import PartOffer, PartTarget, Place, Written
from iobench.checkpoint.ranked.content import RankContent, data_file
from iobench.checkpoint.ranked.index import INDEX, METADATA, Indexer
from iobench.checkpoint.ranked.merge import merged
from iobench.checkpoint.ranked.part import Part, part_file
from iobench.checkpoint.ranked.plan import Box, RankPlan
from iobench.checkpoint.ranked.stock_values import (
    ValueFiles,
    own_skeletons,
    parsed_skeleton,
    stock_values,
)
from iobench.checkpoint.recorded import recorded
from iobench.checkpoint.save import Save
from iobench.checkpoint.staged import Staged
from iobench.errors import DataMismatchError, TargetError, TransferError
from iobench.formats.collector import collector_paused
from iobench.ranks.world import World
from iobench.writers.base import Writer
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.image import Bytes, FileImage
from iobench.writers.local.reused_file import reusing
from iobench.writers.transfer import Transfer

__all__ = ["FORMAT", "DcpFormat"]

FORMAT = "dcp"
"""Of the files of a checkpoint that several ranks saved."""

_READERS = 8


@dataclass(kw_only=True)
class DcpFormat:
    """Writes the part of this rank; `hosts` are those of the ranks."""

    world: World
    hosts: Sequence[str]
    _values: ValueFiles = field(default_factory=ValueFiles)
    _indexer: tuple[RankPlan, Indexer] | None = field(default=None, init=False)

    def write(
        self,
        save: Save,
        content: RankContent,
        memory: Bytes | None,
        target: PartTarget,
        offer: PartOffer | None,
    ) -> Written:
        """Write this rank's file, and then its part manifest. On return the file is durable.

        The part manifest is only for rank 0, which compares it with the vote and removes it.
        `offer` gets what is in `memory` before it is written.
        """
        rank = self.world.rank
        whole = rank == 0 or not content.alike
        has_own = '"$per_rank"' in content.skeleton
        skeleton = parsed_skeleton(content.skeleton) if whole or has_own else {}
        values = [value for value in stock_values(skeleton, rank) if value.own or whole]
        files = self._values.files(values)
        end = b"".join(files.values())
        image = content.whole_image(end) if memory is None else content.image_in(memory, end)
        pieces = [
            *_pieces(content),
            *((f"{name} (value)", len(file)) for name, file in files.items()),
        ]

        def part(record: FileRecord) -> Part:
            return Part(
                rank=rank,
                host=self.world.host,
                file=record,
                values=tuple({value.path: None for value in values}),
                skeleton=skeleton if whole else None,
                own=[own[0] for own in own_skeletons(skeleton)] if has_own else [],
            )

        if offer is not None and rank == 0:
            offer.table = self._indexer_of(content.plan).table
        if offer is not None and memory is not None:
            record = record_of(image, pieces)  # first: a replica needs it too
            offer.make(image, part(record))
            transfer = self._write(save, image, image, target)
        else:
            with recorded(image, Pieces(pieces), by_block=target.by_block) as recording:
                transfer = self._write(save, image, recording.image, target)
            record = recording.record
        text = part(record).to_json()
        target.writer.write(FileImage.of(part_file(rank), [text]), target.directory, durable=False)
        checksum = xxhash.xxh3_64_hexdigest(text)
        return Written(transfer=transfer, file=image, checksum=checksum)

    def _write(self, save: Save, image: FileImage, sent: FileImage, target: PartTarget) -> Transfer:
        # Each rank syncs the directory too: on a file system of several nodes, the sync of rank 0
        # need not make the names durable that others made.
        with reusing(target.directory, target.spare, image.path):
            return target.check(save, target.writer.write(target.paced(sent), target.directory))

    def publish(
        self,
        save: Save,
        content: RankContent,
        own: Written,
        staged: Staged,
        votes: Sequence[str],
        made: Callable[..., Manifest],
        place: Place,
    ) -> Manifest:
        """Commit the parts in `staged`, whose part manifests have the checksums `votes`.

        Raises TargetError for a part that rank 0 cannot see, DataMismatchError for one that
        differs, and TransferError. Then there is no checkpoint.
        """
        del own
        numbers, writer = range(len(votes)), place.writer
        parts = map_in_workers(
            _READERS,
            lambda rank: self._part(writer, staged.directory, rank, votes[rank]),
            numbers,
        )
        with collector_paused():
            skeleton = merged(parts)
            indexer = self._indexer_of(content.plan)
            where = os.fspath(place.store.locate(save.step))
            images = [
                FileImage.of(METADATA, [indexer.metadata(parts, skeleton, where)]),
                FileImage.of(INDEX, [indexer.index(skeleton).encode()]),
            ]
        writer.write_many(images, staged.directory, sync_directory=False)
        staged.remove(map(part_file, numbers))
        records = [record_of(image, [("", image.size_bytes)]) for image in images]
        manifest = made(format=FORMAT, files=(*(part.file for part in parts), *records))
        staged.publish([manifest.to_json()])
        return manifest

    def _part(self, writer: Writer, directory: str | Path, rank: int, checksum: str) -> Part:
        """Return the part of a rank, after a look at all of its files."""
        where = f"{directory}/{part_file(rank)}"
        try:
            with closing(writer.open_source(where)) as source:
                part = Part.parse(source.read(-1), checksum, where)
            file = part.file
            with closing(writer.open_source(f"{directory}/{file.path}")) as source:
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

    def discard(self, directory: Path) -> None:
        """Remove what this rank wrote, where rank 0 has not done so.

        That is on a directory of this node alone, or after rank 0 was lost. What cannot be removed
        has a hidden name, and the next start removes it.
        """
        for name in (data_file(self.world.rank), part_file(self.world.rank)):
            with contextlib.suppress(OSError):
                os.unlink(directory / name)
        try:
            directory.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise TransferError.wrap(error, "removing", directory) from error


def _pieces(content: RankContent) -> Iterator[tuple[str, int]]:
    for box, item in zip(content.plan.boxes, content.plan.file.items, strict=True):
        yield _shown(box), item.stop - item.start


def _shown(box: Box) -> str:
    return f"{box.name} {list(box.offsets)}" if any(box.offsets) else box.name
