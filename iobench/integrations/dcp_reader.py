"""StorageReader: `torch.distributed.checkpoint.load` through a writer."""

from __future__ import annotations

import io
import pickle
import uuid
from collections.abc import Callable
from contextlib import closing
from functools import partial
from operator import itemgetter
from typing import IO, Any, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as StockStorageReader
from torch.futures import Future

from iobench.errors import DataMismatchError, UsageError
from iobench.formats import torch_file, torch_tensor
from iobench.formats.read_ahead import FileRange, joined, read_ahead
from iobench.integrations.dcp_files import DcpLocation, DcpStorage
from iobench.integrations.dcp_writer import metadata_name
from iobench.linux import PAGE
from iobench.units import MIB
from iobench.writers.blocks.pages import pages_to_read_into
from iobench.writers.config import WriterLike
from iobench.writers.image import Bytes

_View = Callable[[MetadataIndex, Bytes], torch.Tensor | None]
_AT_ONCE = 64 * MIB
_DAMAGE = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, ArithmeticError),
    *(AttributeError, ImportError, AssertionError),
)
"""Errors that unpickling raises for a file that is damaged or is not a pickle."""


class StorageReader(DcpStorage, StockStorageReader):
    """Loads checkpoints that `StorageWriter` or stock `FileSystemWriter` saved.

    It reads only the ranges in the plan, up to 64 MiB at once. Storage delivers the next range
    while the last one is copied into its tensors. `transfers` has one Transfer per range.
    """

    def __init__(self, path: DcpLocation, writer: WriterLike) -> None:
        """`writer`: a Writer, a name, or the path of a config. Raises UsageError."""
        super().__init__(path, writer)
        self.load_id = str(uuid.uuid4())
        """Identifies the newest load; the metadata that `read_metadata` returns records it."""
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: DcpLocation | None = None) -> None:
        """Begin a new load, from `checkpoint_id` if it is given."""
        self._begin_at(checkpoint_id)
        self.load_id = str(uuid.uuid4())
        self._metadata = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata, unpickled as in stock DCP: load only what you trust.

        Raises TransferError (ENOENT) if there is no complete checkpoint, and DataMismatchError if
        the metadata is damaged.
        """
        del args
        name = metadata_name(kwargs.get("rank"))
        with self._source(name) as source:
            try:
                metadata = pickle.load(cast(IO[bytes], source))
            except _DAMAGE as error:
                raise DataMismatchError(
                    f"{self._path(name)}: not metadata of DCP ({error})"
                ) from error
        if not isinstance(metadata, Metadata):
            raise DataMismatchError(f"{self._path(name)}: not metadata of DCP")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Called by DCP: take over the file, offset and length of every item."""
        del is_coordinator, args, kwargs
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load every item of this rank's plan. The future is done on return.

        Raises TransferError, and DataMismatchError if a file does not match the metadata.
        """
        metadata = self._metadata
        assert metadata is not None  # DCP calls set_up_storage_reader first
        items = [self._range_of(metadata, request) for request in plan.items]
        sizes = {name: self._size_of(name) for name in {one.path for one in items}}
        for one in items:
            if one.stop > (size := sizes[one.path]):
                raise DataMismatchError(
                    f"{self._path(one.path)}: has {size} bytes, but the metadata names later ones"
                )
        wanted = sorted((one for one in items if sizes[one.path]), key=itemgetter(0, 1))
        tensor = partial(_saved_tensor, metadata, torch_tensor.settings())
        reading = read_ahead(
            self._writer,
            self._location,
            sizes,
            joined(wanted, sizes, _AT_ONCE),
            largest_bytes=max([_AT_ONCE, *(one.stop - one.start for one in wanted)]) + 2 * PAGE,
            threads=1,
            pages=pages_to_read_into,
            on_read=self.transfers.append,
        )
        with closing(reading):
            for window, memory in reading:
                for one in window.wanted:
                    data = memory[one.start - window.start : one.stop - window.start]
                    where = f"{self._path(one.path)}, {one.start}"
                    _fill(planner, tensor, one.wanted, data, where)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _range_of(self, metadata: Metadata, request: ReadItem) -> FileRange:
        """Return where the item of `request` is stored. Raises UsageError for an encoded one."""
        stored = metadata.storage_data[request.storage_index]
        if getattr(stored, "transform_descriptors", None):
            raise UsageError(
                f"{self.checkpoint_id}: {request.storage_index.fqn!r} was saved through the stream "
                f"extension {stored.transform_descriptors}; load it with torch's FileSystemReader"
            )
        start = int(stored.offset)
        return FileRange(stored.relative_path, start, start + int(stored.length), request)

    def _size_of(self, name: str) -> int:
        with self._source(name) as source:
            return source.seek(0, io.SEEK_END)


def _fill(planner: LoadPlanner, tensor: _View, request: ReadItem, data: Bytes, where: str) -> None:
    if request.type == LoadItemType.BYTE_IO:
        planner.load_bytes(request, io.BytesIO(data.tobytes()))
        return
    saved = tensor(request.storage_index, data)
    if saved is None:
        saved = torch_file.view(data, where)
    if not isinstance(saved, torch.Tensor):
        raise DataMismatchError(f"{where}: holds a {type(saved).__name__} instead of a tensor")
    part = narrow_tensor_by_index(saved, request.storage_offsets, request.lengths)
    target = planner.resolve_tensor(request).detach()
    if target.size() != part.size():
        raise DataMismatchError(
            f"{where}: {request.storage_index.fqn!r} has the shape {tuple(part.shape)}; "
            f"the tensor to load into has {tuple(target.shape)}"
        )
    target.copy_(part)
    planner.commit_tensor(request, target)


def _saved_tensor(
    metadata: Metadata, settings: torch_tensor.Settings, index: MetadataIndex, data: Bytes
) -> torch.Tensor | None:
    """Return the tensor in `data` if it is small and contiguous; None if torch must read it."""
    stored = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(stored, TensorStorageMetadata):
        return None
    chunks = stored.chunks
    if len(chunks) > 1:
        at = index.index
        if at is None or at >= len(chunks) or chunks[at].offsets != index.offset:
            return None
        chunks = chunks[at : at + 1]
    shape = tuple(chunks[0].sizes)
    return torch_tensor.view(data, stored.properties.dtype, shape, settings)
