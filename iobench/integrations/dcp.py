"""torch.distributed.checkpoint (DCP) through a writer; the files are those of the stock classes.

    import torch.distributed.checkpoint as dcp
    from iobench.integrations.dcp import StorageReader, StorageWriter

    dcp.save(state, storage_writer=StorageWriter("/mnt/nvme/step-100", "writer.toml"))
    dcp.load(state, storage_reader=StorageReader("/mnt/nvme/step-100", "writer.toml"))

Stock `FileSystemReader` reads what StorageWriter wrote, and StorageReader reads what stock
`FileSystemWriter` wrote. Tensors are written from their own memory. With the writer `s3` a path is `s3://bucket/prefix`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import heapq
import io
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from math import prod
from operator import itemgetter
from typing import IO, Any, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageReader as StockStorageReader
from torch.distributed.checkpoint.storage import StorageWriter as StockStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from iobench.errors import DataMismatchError, TargetError, TransferError, UsageError
from iobench.formats import dcp_file, torch_file
from iobench.formats.dcp_file import DcpFile
from iobench.formats.read_ahead import FileRange, joined, read_ahead
from iobench.formats.tensors import tensor_memory
from iobench.integrations.default_writer import chosen_writer
from iobench.integrations.slice_planner import SlicePlanner
from iobench.linux import PAGE
from iobench.units import MIB
from iobench.writers.base import Source
from iobench.writers.blocks import interpreter_end
from iobench.writers.blocks.pages import pages_to_read_into
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.config import WriterLike
from iobench.writers.image import Bytes, FileImage
from iobench.writers.removal import remove_file
from iobench.writers.transfer import Transfer

__all__ = ["SlicePlanner", "StorageReader", "StorageWriter"]

_METADATA = ".metadata"
_LEAVING_S = 5.0
_View = Callable[[MetadataIndex, Bytes], torch.Tensor | None]
_AT_ONCE = 64 * MIB
_DAMAGE = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, ArithmeticError),
    *(AttributeError, ImportError, AssertionError),
)
"""Errors that unpickling raises for a file that is damaged or is not a pickle."""

DcpLocation = str | os.PathLike[str]


def _metadata_name(rank: int | None) -> str:
    """Return the name of the metadata file of all ranks, or of one saving without collectives."""
    return _METADATA if rank is None else f"__{rank}{_METADATA}"


class DcpStorage:
    """The files in a checkpoint's directory, or under its prefix `s3://bucket/prefix`."""

    def __init__(self, path: DcpLocation, writer: WriterLike) -> None:
        self.transfers: list[Transfer] = []
        """One Transfer for each file of the saves or loads since the last `reset`."""
        self._writer, self._location = chosen_writer(writer), ""
        self._begin_at(path)

    @property
    def checkpoint_id(self) -> str:
        """The location of the checkpoint."""
        return self._location

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: DcpLocation) -> bool:
        """Return False: DCP must not choose this class for a bare path, since it needs a writer."""
        del checkpoint_id
        return False

    def _begin_at(self, checkpoint_id: DcpLocation | None) -> None:
        """Begin a new save or load, at `checkpoint_id` if it is given.

        Raises UsageError if the writer cannot use the location.
        """
        if checkpoint_id:
            self._writer.check_scheme(os.fspath(checkpoint_id))
            self._location = os.fspath(checkpoint_id)
        self.transfers = []

    def _path(self, name: str) -> str:
        return f"{self._location.rstrip('/')}/{name}"

    @contextmanager
    def _source(self, name: str) -> Iterator[Source]:
        """Open the file `name` for reading parts of it. Raises TransferError."""
        with closing(self._writer.open_source(self._path(name))) as opened:
            yield opened

    def _exists(self, name: str) -> bool:
        try:
            with self._source(name):
                return True
        except TransferError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return False
            raise


class StorageWriter(DcpStorage, StockStorageWriter, BlockingAsyncStager):
    """Saves a checkpoint that stock `FileSystemReader` reads; each file by the writer's I/O path.

    The checkpoint is durable when `dcp.save` returns, or when the future of `dcp.async_save` is
    done: each file is synced before it gets its name, and `.metadata`, the commit, comes last. A
    save that fails or is killed leaves no `.metadata`; complete files of it may stay. `transfers`
    has one Transfer for each file of this rank.

    An interpreter that ends waits for each `async_save` that runs in a thread. If one fails, or has
    failed since the newest save began, the exit code is 120 and stderr has a message.

    Overwriting removes the old `.metadata` first: a save that is killed leaves no checkpoint, never
    a mix of two. Save to a new location to keep the old checkpoint until the new one is complete.
    """

    def __init__(
        self,
        path: DcpLocation,
        writer: WriterLike,
        *,
        single_file_per_rank: bool = True,
        thread_count: int = 2,
        overwrite: bool = True,
        cache_staged_state_dict: bool = False,
    ) -> None:
        """`writer`: a Writer, a name, or the path of a config.

        Each rank writes `thread_count` files concurrently, with its tensors distributed evenly by
        size. `single_file_per_rank=False` makes one file for each tensor. For
        `cache_staged_state_dict` see torch's BlockingAsyncStager. Raises UsageError.
        """
        if thread_count < 1:
            raise UsageError(f"thread_count={thread_count}: must be 1 or more")
        DcpStorage.__init__(self, path, writer)
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        self._single_file_per_rank = single_file_per_rank
        self._thread_count = thread_count
        self._overwrite = overwrite
        self.save_id = str(uuid.uuid4())
        """Identifies the newest save; `.metadata` records it."""
        self._own_rank: int | None = None  # set in a save without collectives only
        self._finishes = True

    def reset(self, checkpoint_id: DcpLocation | None = None) -> None:
        """Begin a new save, to `checkpoint_id` if it is given."""
        self._begin_at(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP: note whether this rank is the coordinator and saves with collectives."""
        del args
        _Save(self.checkpoint_id)
        self._own_rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")
        self._finishes = is_coordinator or self._own_rank is not None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Remove an old `.metadata`. With `overwrite=False` raise TargetError for one instead."""
        with _step():
            self._remove_metadata(_metadata_name(self._own_rank))
        if self._own_rank is not None:
            return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self._own_rank}_"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank its own file names."""
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))
            if plan.storage_data is None
            else plan
            for rank, plan in enumerate(plans)
        ]

    def _remove_metadata(self, name: str) -> None:
        if not self._exists(name):
            return
        if not self._overwrite:
            raise TargetError(
                f"{self.checkpoint_id}: a checkpoint already exists; choose another location, or "
                "pass overwrite=True"
            )
        with contextlib.suppress(FileNotFoundError):  # another rank removed it first
            remove_file(self._path(name), self._writer)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, each durable and under its name on return."""
        prefix: str = plan.storage_data.prefix
        groups = [[item] for item in plan.items]
        if self._single_file_per_rank:
            groups = _distributed(plan.items, self._thread_count)

        def write(number: int) -> tuple[Transfer, list[WriteResult]]:
            name = f"{prefix}{number}{DEFAULT_SUFFIX}"
            return self._write_file(name, groups[number], planner)

        with _step(last=not self._finishes):
            if torch.cuda.is_initialized():  # other threads copy what this one has queued there
                torch.cuda.current_stream().synchronize()
            numbers = range(len(groups))
            files = map_in_workers(self._thread_count, write, numbers, caller_waits=True)
        self.transfers += [transfer for transfer, _ in files]
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for _, results in files for result in results])
        return done

    def _write_file(
        self, name: str, items: Sequence[WriteItem], planner: SavePlanner
    ) -> tuple[Transfer, list[WriteResult]]:
        """Write the tensors of `items` from their memory, and then what torch must serialize."""
        tensors: list[tuple[WriteItem, torch.Tensor]] = []
        others: list[tuple[WriteItem, bytes]] = []
        for item in items:
            data = planner.resolve_data(item)
            tensor = None if isinstance(data, io.BytesIO) else dcp_file.plain(data)
            if tensor is not None:
                tensors.append((item, tensor))
            else:
                others.append((item, _serialized(data)))
        file = DcpFile([(tensor.dtype, tuple(tensor.shape)) for _, tensor in tensors])
        image = file.image_of(
            name,
            [tensor_memory(tensor) for _, tensor in tensors if tensor.numel()],
            checked=dcp_file.settings().crc,
            end=b"".join(data for _, data in others),
        )
        moved = self._writer.write(image, self._location)
        places = [
            (item, at.start, at.length) for (item, _), at in zip(tensors, file.items, strict=True)
        ]
        start = file.size_bytes
        for item, stored in others:
            places.append((item, start, len(stored)))
            start += len(stored)
        return moved, [
            WriteResult(
                index=item.index,
                size_in_bytes=length,
                storage_data=_StorageInfo(name, start, length),
            )
            for item, start, length in places
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`, which commits the checkpoint."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for all_ in results for one in all_}
        metadata.storage_meta = self.storage_meta()
        name = _metadata_name(self._own_rank)
        with _step(last=True):
            image = FileImage.of(name, [pickle.dumps(metadata)])
            self.transfers.append(self._writer.write(image, self._location))

    def storage_meta(self) -> StorageMeta:
        """Return what DCP records about this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)


class _Save:
    """One save, in the thread that has made this object.

    `over`: the last step of this rank is done, or one of its steps has raised `failure`. A save in
    a thread of DCP is one that the script may never ask about: it may drop its future.

    CPython joins these threads before it ends. A signal handler that raises SystemExit interrupts
    this join, so it is repeated here. A save that begins later than the failure of another one
    clears that failure: the script could have asked before. Saves may overlap.
    """

    def __init__(self, location: DcpLocation) -> None:
        """Begin a save of this thread. One of the main thread raises its errors to the script."""
        self.thread = threading.current_thread()
        self.location, self.failure = os.fspath(location), ""
        self.over = threading.Event()
        _own.save = self
        with _lock:
            _background[:] = [one for one in _background if one.runs]
            if self.thread is not threading.main_thread():
                _background.append(self)
                interpreter_end.at_end(self, _Save.end)

    @property
    def runs(self) -> bool:
        """Whether it has steps left. DCP may fail between two: then its thread ends."""
        alive = (
            self.thread is not threading.current_thread() and self.thread in threading.enumerate()
        )
        return alive and not self.over.is_set()

    def end(self) -> None:
        """Wait for the save at the end of the interpreter, and report its failure."""
        if self not in _background:
            return
        if not self.thread.daemon:
            # No join: after an interrupted join CPython 3.11 and 3.12 report the thread as ended.
            while self.thread in threading.enumerate() and not self.over.wait(0.05):
                pass
            # A thread that is killed inside torch's C++ code aborts the process.
            until_s = time.monotonic() + _LEAVING_S
            while self.thread in threading.enumerate() and time.monotonic() < until_s:
                time.sleep(0.01)
        if self.failure:
            interpreter_end.lost(f"async_save to {self.location} failed: {self.failure}")
        elif not self.over.is_set():
            interpreter_end.lost(f"async_save to {self.location} did not end")


_background: list[_Save] = []
_lock = threading.RLock()  # a signal handler may save too
_own = threading.local()


@contextmanager
def _step(*, last: bool = False) -> Iterator[None]:
    """Run one step of this thread's save; `last` marks the last step of this rank."""
    save: _Save | None = getattr(_own, "save", None)
    try:
        yield
    except BaseException as error:
        if save is not None:
            save.failure = repr(error)
            save.over.set()
        raise
    if last and save is not None:
        save.over.set()


def _serialized(data: torch.Tensor | io.BytesIO) -> bytes:
    """Return what stock DCP stores of an object, or of a tensor. Raises what stock raises."""
    if isinstance(data, io.BytesIO):
        return data.getvalue()
    tensor = data.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save of a view saves the whole storage
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def _size_bytes(item: WriteItem) -> int:
    """Estimate the item's bytes in the file; 0 for objects that are not serialized yet."""
    if item.type == WriteItemType.BYTE_IO:
        return 0
    assert item.tensor_data is not None
    itemsize: int = item.tensor_data.properties.dtype.itemsize
    return prod(item.tensor_data.chunk.sizes) * itemsize


def _distributed(items: Sequence[WriteItem], files: int) -> list[list[WriteItem]]:
    """Return up to `files` groups of about equal size, the largest items first in each."""
    groups: list[list[WriteItem]] = [[] for _ in range(min(files, len(items)) or 1)]
    heap = [(0, number) for number in range(len(groups))]
    for item in sorted(items, key=_size_bytes, reverse=True):
        size, number = heapq.heappop(heap)
        groups[number].append(item)
        heapq.heappush(heap, (size + max(1, _size_bytes(item)), number))
    return groups


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
        name = _metadata_name(kwargs.get("rank"))
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
        tensor = partial(_saved_tensor, metadata, dcp_file.settings())
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
    metadata: Metadata, settings: dcp_file.Settings, index: MetadataIndex, data: Bytes
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
    return dcp_file.view(data, stored.properties.dtype, shape, settings)
