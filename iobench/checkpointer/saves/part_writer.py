"""PartWriter: writes what one rank contributes to a checkpoint, durably."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.manifest import FileRecord
from iobench.checkpoint.pacing import PacedImage
from iobench.checkpoint.pieces import Pieces
from iobench.checkpoint.ranked.content import RankContent, data_file
from iobench.checkpoint.ranked.part import Part, part_file
from iobench.checkpoint.ranked.plan import Box
from iobench.checkpoint.ranked.stock_values import (
    ValueFiles,
    own_skeletons,
    parsed_skeleton,
    stock_values,
)
from iobench.checkpoint.recorded import recorded
from iobench.checkpoint.store import CheckpointStore, DirectoryStore
from iobench.errors import TransferError
from iobench.ranks.world import World
from iobench.remote.probe import write_probe
from iobench.replicas.offering import Offering
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.local.reused_file import reusing
from iobench.writers.transfer import Transfer

__all__ = ["PartWriter", "Written"]


class Written(NamedTuple):
    """A part on storage: its transfer, the XXH3-64 of its part manifest, and its file."""

    transfer: Transfer
    checksum: str
    file: FileImage


@dataclass(frozen=True, kw_only=True)
class PartWriter:
    """Writes the parts of one rank through `writer`."""

    world: World
    writer: Writer
    rate_bytes_per_s: int | None
    _values: ValueFiles = field(default_factory=ValueFiles)

    def write(
        self,
        content: RankContent,
        memory: Bytes | None,
        directory: str | Path,
        offering: Offering,
        spare: str = "",
    ) -> Written:
        """Write this rank's files, and then its part manifest. On return the files are durable.

        The part manifest is only for rank 0, which compares it with the vote and removes it.

        The tensors are in `memory`, or else in the trainer's own. `offering` gets what is in
        `memory` before it is written. The file takes over the space of that in the directory
        `spare`. Raises TransferError.
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

        if offering.wanted and memory is not None:
            record = record_of(image, pieces)  # first: a replica needs it too
            offering.make(image, part(record))
            transfer = self._write(image, directory, spare)
        else:
            by_block = self.writer.direct and not self.rate_bytes_per_s
            with recorded(image, Pieces(pieces), by_block=by_block) as recording:
                transfer = self._write(recording.image, directory, spare)
            record = recording.record
        text = part(record).to_json()
        self.writer.write(FileImage.of(part_file(rank), [text]), directory, durable=False)
        return Written(transfer, xxhash.xxh3_64_hexdigest(text), image)

    def _write(self, image: FileImage, directory: str | Path, spare: str) -> Transfer:
        limit = self.rate_bytes_per_s
        sent = PacedImage.over(image, limit) if limit else image
        # Each rank syncs the directory too: on a file system of several nodes, the sync of rank 0
        # need not make the names durable that others made.
        with reusing(directory, spare, image.path):
            return self._checked(self.writer.write(sent, directory), directory)

    def _checked(self, transfer: Transfer, directory: str | Path) -> Transfer:
        if not transfer.durable:
            raise TransferError(
                f"{directory}: writer {self.writer.name!r} did not make its file durable; the "
                "checkpoint is not committed"
            )
        return transfer

    def probe(self, store: CheckpointStore, memory: Bytes) -> None:
        """Write `memory` to the directory of `store`, durably, and remove it again."""
        assert isinstance(store, DirectoryStore)
        write_probe(self.writer, store.directory, memory, self.rate_bytes_per_s)

    def discard(self, directory: str | Path) -> None:
        """Remove what this rank wrote, where rank 0 has not done so.

        That is on a directory of this node alone, or after rank 0 was lost. What cannot be removed
        has a hidden name, and the next start removes it.
        """
        if not isinstance(directory, Path):
            return  # rank 0 removes all objects of the prefix
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
