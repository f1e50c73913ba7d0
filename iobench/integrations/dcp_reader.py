"""StorageReader: `torch.distributed.checkpoint.load` through a writer."""

from __future__ import annotations

import io
import itertools
import pickle
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, cast

import numpy as np
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as StockStorageReader
from torch.futures import Future

from iobench import linux
from iobench.errors import DataMismatchError, UsageError
from iobench.formats import torch_file, torch_tensor
from iobench.formats.many_parts import WindowImage
from iobench.formats.tensor_slices import GAP_BYTES
from iobench.integrations.dcp_files import DcpLocation, DcpStorage
from iobench.integrations.dcp_writer import metadata_name
from iobench.units import MIB
from iobench.writers.blocks.channel import Channel, Lease
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
        with self._files.source(name) as source:
            try:
                metadata = pickle.load(cast(IO[bytes], source))
            except _DAMAGE as error:
                raise DataMismatchError(
                    f"{self._files.path(name)}: not metadata of DCP ({error})"
                ) from error
        if not isinstance(metadata, Metadata):
            raise DataMismatchError(f"{self._files.path(name)}: not metadata of DCP")
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
        wanted: dict[str, list[_Item]] = defaultdict(list)
        metadata, settings = self._metadata, torch_tensor.settings()
        assert metadata is not None  # DCP calls set_up_storage_reader first
        for request in plan.items:
            stored = metadata.storage_data[request.storage_index]
            if getattr(stored, "transform_descriptors", None):
                raise UsageError(
                    f"{self.checkpoint_id}: {request.storage_index.fqn!r} was saved through the "
                    f"stream extension {stored.transform_descriptors}; load it with torch's "
                    "FileSystemReader"
                )
            wanted[stored.relative_path].append(_Item(request=request, stored=stored))
        rooms, tensor = _Rooms(), partial(_saved_tensor, metadata, settings)
        for name, items in wanted.items():
            self._read_file(name, items, rooms, partial(_fill, planner, tensor))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(
        self,
        name: str,
        items: list[_Item],
        rooms: _Rooms,
        fill: Callable[[ReadItem, Bytes, str], None],
    ) -> None:
        with self._files.source(name) as source:
            size = source.seek(0, io.SEEK_END)
        if any(item.stop > size for item in items):
            raise DataMismatchError(
                f"{self._files.path(name)}: has {size} bytes, but the metadata names later ones"
            )
        if not size:
            return
        path = self._files.path(name)

        def fetch(run: _Run) -> None:
            window = WindowImage(name, size, run.start, run.room)
            self.transfers.append(
                self._files.writer.read(
                    window, self._files.location, start=run.start, stop=min(run.stop, size)
                )
            )

        ahead: Channel[_Run] = Channel(lambda: ahead.serve(fetch), name="iobench-dcp", limit=2)
        leases = [Lease(run) for run in _runs(items)]
        try:
            for lease, following in itertools.pairwise([None, *leases, None]):
                if following:
                    following.item.room = rooms.take(following.item)
                    ahead.submit(following)
                if lease:
                    ahead.wait(lease)
                    run = lease.item
                    for item in run.items:
                        data = run.room[item.start - run.start : item.stop - run.start]
                        fill(item.request, data, f"{path}, {item.start}")
                    rooms.give(run)
        finally:
            ahead.close(drop=True)


@dataclass(frozen=True, kw_only=True)
class _Item:
    """A request of the plan, and its byte range in the file."""

    request: ReadItem
    stored: _StorageInfo

    @property
    def start(self) -> int:
        return int(self.stored.offset)

    @property
    def stop(self) -> int:
        return int(self.stored.offset + self.stored.length)


@dataclass(kw_only=True)
class _Run:
    """Items that are read together: whole pages from `start` to `stop`, into `room`."""

    start: int
    stop: int
    items: list[_Item]
    room: Bytes = field(default_factory=lambda: np.empty(0, dtype=np.uint8))

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


class _Rooms:
    """Memory of runs, used again: it has its pages then. New pages cost as much as the copy."""

    def __init__(self) -> None:
        self._spare: list[Bytes] = []

    def take(self, run: _Run) -> Bytes:
        """Return memory for a run: pages of its size or more. Raises OSError (ENOMEM)."""
        if self._spare and run.size_bytes <= _AT_ONCE:
            return self._spare.pop()
        size = max(run.size_bytes, _AT_ONCE)  # address space, which takes no memory yet
        return pages_to_read_into(size)

    def give(self, run: _Run) -> None:
        """Take back the memory of a run; that of a large item is freed."""
        if run.size_bytes <= _AT_ONCE:
            self._spare.append(run.room)
        run.room = np.empty(0, dtype=np.uint8)


def _runs(items: Sequence[_Item]) -> Iterator[_Run]:
    """Group the items by file offset: those near each other become one run.

    Runs are whole pages, so a run may begin with the page that the run before ends with.
    """
    run: _Run | None = None
    for item in sorted(items, key=lambda item: item.start):
        start, stop = item.start - item.start % linux.PAGE, -(-item.stop // linux.PAGE) * linux.PAGE
        if run and start - run.stop < GAP_BYTES and max(stop, run.stop) - run.start <= _AT_ONCE:
            run.stop = max(stop, run.stop)
            run.items.append(item)
            continue
        if run:
            yield run
        run = _Run(start=start, stop=stop, items=[item])
    if run:
        yield run


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
