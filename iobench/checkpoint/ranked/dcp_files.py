"""DcpFormat: the files of a checkpoint of several ranks, which stock DCP reads too.

Each rank writes one file, and a part manifest for rank 0. Rank 0 looks at all of them, and adds the
index.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from iobench.checkpoint.checksums import record_of, recorded
from iobench.checkpoint.manifest import FileRecord, Manifest, Pieces
from iobench.checkpoint.place import PartOffer, PartTarget, Place, SaveJob, Written
from iobench.checkpoint.ranked.messages import Part, part_file
from iobench.checkpoint.ranked.plan import Box, RankContent, RankPlan, WholePlan, data_file
from iobench.checkpoint.ranked.structure import (
    name_of,
    own_skeletons,
    stock_paths,
    stock_values,
    value_file,
)
from iobench.checkpoint.state_tree import json_text, parsed
from iobench.checkpoint.store import Staged
from iobench.errors import DataMismatchError, StateError, TargetError, TransferError
from iobench.formats.collector import collector_paused
from iobench.formats.dcp_file import DcpFile
from iobench.formats.tensors import dtype_name
from iobench.ranks.world import World
from iobench.writers.base import Writer
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.image import FileImage
from iobench.writers.transfer import Transfer

_SHOWN = 60  # characters of a value in a message


def merged(parts: Sequence[Part]) -> Any:
    """Return the skeleton of the state of all ranks, from their parts in rank order.

    Dicts are united: a rank of pipeline parallelism has keys of its own. The values of a PerRank
    are listed by rank. Raises StateError for other differences.
    """
    if all(part.skeleton is None for part in parts[1:]):
        whole = parts[0].skeleton
        others = [part.own for part in parts[1:]]
        for number, own in enumerate(own_skeletons(whole)):
            own += [values[number] for values in others]
        return whole
    return _Merge(len(parts)).of([part.skeleton for part in parts], range(len(parts)), "state")


class _Merge:
    """Unites the skeletons of `count` ranks."""

    def __init__(self, count: int) -> None:
        self._count = count

    def of(self, values: Sequence[Any], ranks: Sequence[int], path: str) -> Any:
        first = values[0]
        if not all(isinstance(value, dict) for value in values):
            if all(isinstance(value, list) and len(value) == len(first) for value in values):
                return [
                    self.of(items, ranks, f"{path}[{number}]")
                    for number, items in enumerate(zip(*values, strict=True))
                ]
            return _same(values, ranks, path)
        if any("$dict" in value for value in values):  # elsewhere all keys may be text, or none
            values = [one if _has_tag(one) else {"$dict": list(one.items())} for one in values]
            first = values[0]
        tags = {next(iter(value), "") for value in values}
        if tags == {"$per_rank"}:
            if len(values) != self._count:
                raise StateError(
                    f"{path} is a PerRank that some ranks lack; all ranks must have it"
                )
            return {"$per_rank": [value["$per_rank"][0] for value in values]}
        tag = first and next(iter(first))
        if len(tags) == 1 and tag in ("$dict", "$ordered"):
            return {**first, tag: self._pairs([value[tag] for value in values], ranks, path)}
        if len(tags) == 1 and tag == "$tuple":
            return {tag: self.of([value[tag] for value in values], ranks, path)}
        if any(map(_has_tag, values)):
            return _same(values, ranks, path)
        keys = dict.fromkeys(key for value in values for key in value)
        united = {}
        for key in keys:
            have = [at for at, value in enumerate(values) if key in value]
            united[key] = self.of(
                [values[at][key] for at in have], [ranks[at] for at in have], f"{path}[{key!r}]"
            )
        return united

    def _pairs(self, listed: Sequence[Any], ranks: Sequence[int], path: str) -> list[Any]:
        keys = {json_text(key): key for pairs in listed for key, _ in pairs}
        found = [{json_text(key): item for key, item in pairs} for pairs in listed]
        return [
            [
                key,
                self.of(
                    [one[text] for one in found if text in one],
                    [rank for one, rank in zip(found, ranks, strict=True) if text in one],
                    f"{path}[{text}]",
                ),
            ]
            for text, key in keys.items()
        ]


def _has_tag(value: dict[str, Any]) -> bool:
    return next(iter(value), "").startswith("$")


def _same(values: Sequence[Any], ranks: Sequence[int], path: str) -> Any:
    for value, rank in zip(values, ranks, strict=True):
        if value != values[0]:
            raise StateError(
                f"{path} differs between rank {ranks[0]} ({json_text(values[0])[:_SHOWN]}) and "
                f"rank {rank} ({json_text(value)[:_SHOWN]}); wrap it in iobench.PerRank"
            )
    return values[0]


INDEX = "state.json"
"""The skeleton of the state, and which piece of which file has which part of each tensor."""
METADATA = ".metadata"
"""Stock DCP's index, a pickle. iobench never reads it."""


class Indexer:
    """Makes these files for the checkpoints of one plan."""

    def __init__(self, plan: WholePlan) -> None:
        self._plan = plan
        # In the order of the pieces in each rank's file.
        self._files = [DcpFile([(box.dtype, box.sizes) for box in boxes]) for boxes in plan.boxes]
        self.table = json_text(self._table())

    def _table(self) -> dict[str, Any]:
        table: dict[str, Any] = {
            name: {"dtype": dtype_name(found.properties.dtype), "shape": found.size, "chunks": []}
            for name, found in self._plan.metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)  # as all are that a plan has
        }
        for rank, boxes in enumerate(self._plan.boxes):
            for number, (box, item) in enumerate(zip(boxes, self._files[rank].items, strict=True)):
                chunk = [rank, number, item.data_start - item.start, box.offsets, box.sizes]
                table[box.name]["chunks"].append(chunk)
        return table

    def index(self, skeleton: Any) -> str:
        """Return the file `INDEX`."""
        return f'{{"skeleton":{json_text(skeleton)},"tensors":{self.table}}}'

    def metadata(self, parts: Sequence[Part], skeleton: Any, location: str) -> bytes:
        """Return the file `METADATA`. `skeleton` is the merged one."""
        found: dict[str, Any] = dict(self._plan.metadata.state_dict_metadata)
        storage: dict[MetadataIndex, Any] = {}
        chunks: dict[str, list[tuple[Any, Any]]] = {}
        for part, boxes, file in zip(parts, self._plan.boxes, self._files, strict=True):
            for box, item in zip(boxes, file.items, strict=True):
                stored = _StorageInfo(part.file.path, item.start, item.length)
                storage[MetadataIndex(box.name, box.offsets)] = stored
                chunks.setdefault(box.name, []).append((box.offsets, stored))
        paths: dict[str, Any] = {}
        for path, name in stock_paths(skeleton, range(len(parts))):
            stock = name_of(path)
            paths.setdefault(stock, path)
            paths.setdefault(name, (name,))  # another one than `stock` if two paths have one name
            if stock not in found:  # tied to another tensor: the same bytes
                found[stock] = found[name]
                storage.update((MetadataIndex(stock, at), one) for at, one in chunks[name])
        for part in parts:
            for name, path, stored in _values(part):
                if name not in found:
                    found[name], paths[name] = BytesStorageMetadata(), path
                    storage[MetadataIndex(name)] = stored
        metadata = Metadata(
            state_dict_metadata=found,
            planner_data=paths,
            storage_data=storage,
            storage_meta=StorageMeta(checkpoint_id=location),
            version=CURRENT_DCP_VERSION,
        )
        return pickle.dumps(metadata)


def _values(part: Part) -> Iterator[tuple[str, Any, _StorageInfo]]:
    """Yield the name, the path and the place of each plain value in the file of a rank."""
    sizes = [piece.size_bytes for piece in part.file.pieces]
    starts = list(itertools.accumulate(sizes, initial=0))
    first = len(sizes) - len(part.values)
    for number, path in enumerate(part.values, start=first):
        stored = _StorageInfo(part.file.path, starts[number], sizes[number])
        yield name_of(path), path, stored


FORMAT = "dcp"
"""Of the files of a checkpoint that several ranks saved."""

_READERS = 8


@dataclass(kw_only=True)
class DcpFormat:
    """Writes the part of this rank; `hosts` are those of the ranks."""

    world: World
    hosts: Sequence[str]
    _indexer: tuple[RankPlan, Indexer] | None = field(default=None, init=False)

    def write(self, job: SaveJob, offer: PartOffer | None) -> Written:
        """Write this rank's file, and then its part manifest. On return the file is durable.

        The part manifest is only for rank 0, which compares it with the vote and removes it.
        `offer` gets what is in `memory` before it is written.
        """
        _, content, memory, target = job
        rank = self.world.rank
        whole = rank == 0 or not content.alike
        has_own = '"$per_rank"' in content.skeleton
        skeleton = parsed(content.skeleton) if whole or has_own else {}
        values = [value for value in stock_values(skeleton, rank) if value.own or whole]
        files = {name_of(value.path): value_file(value) for value in values}
        end = b"".join(files.values())
        image = content.whole_image(end) if memory is None else content.image_in(memory, end)
        pieces = [
            *_pieces(content),
            *((f"{name} (value)", len(file)) for name, file in files.items()),
        ]

        def part(record: FileRecord) -> Part:
            return Part(
                rank=rank,
                file=record,
                values=tuple({value.path: None for value in values}),
                skeleton=skeleton if whole else None,
                own=[own[0] for own in own_skeletons(skeleton)] if has_own else [],
            )

        if offer is not None and memory is not None:
            record = record_of(image, pieces)  # first: a replica needs it too
            offer(image, part(record), None if rank else self._indexer_of(content.plan).table)
            transfer = self._write(image, target)
        else:
            with recorded(image, Pieces(pieces), by_block=target.by_block) as (sent, digests):
                transfer = self._write(sent, target)
            record = digests.record()
        text = part(record).to_json()
        target.writer.write(FileImage.of(part_file(rank), [text]), target.directory, durable=False)
        checksum = xxhash.xxh3_64_hexdigest(text)
        return Written(transfer=transfer, file=image, checksum=checksum)

    def _write(self, sent: FileImage, target: PartTarget) -> Transfer:
        # Each rank syncs the directory too: on a file system of several nodes, the sync of rank 0
        # need not make the names durable that others made.
        return target.writer.write(target.limited(sent), target.directory)

    def publish(
        self,
        job: SaveJob,
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
            indexer = self._indexer_of(job.content.plan)
            where = os.fspath(place.store.locate(job.save.step))
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
