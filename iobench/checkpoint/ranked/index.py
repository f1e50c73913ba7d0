"""The files that rank 0 adds to a checkpoint: the index for iobench, `.metadata` for stock DCP."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from iobench.checkpoint.ranked.part import Part
from iobench.checkpoint.ranked.plan import WholePlan
from iobench.checkpoint.ranked.stock_values import name_of, stock_paths
from iobench.checkpoint.tree_spec import json_text
from iobench.formats.dcp_file import DcpFile
from iobench.formats.tensors import dtype_name

__all__ = ["INDEX", "METADATA", "Indexer"]

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
