"""StorageReader: `torch.distributed.checkpoint.load` through a writer."""

from __future__ import annotations

import io
import itertools
import pickle
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as StockStorageReader
from torch.futures import Future

from iobench import linux
from iobench.environment.memory import host_takes_free_memory
from iobench.errors import DataMismatchError, UsageError
from iobench.formats import torch_file
from iobench.integrations.dcp_files import DcpLocation, DcpStorage
from iobench.integrations.dcp_writer import metadata_name
from iobench.integrations.default_writer import WriterLike
from iobench.units import MIB
from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes, FileImage

__all__ = ["StorageReader"]

_AT_ONCE = 256 * MIB
_GAP = MIB  # fewer bytes than these are read along rather than left out
_DAMAGE = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, ArithmeticError),
    *(AttributeError, ImportError, AssertionError),
)
"""What unpickling a file raises that is damaged, or is something else."""


class StorageReader(DcpStorage, StockStorageReader):
    """Loads what `StorageWriter`, or stock `FileSystemWriter`, saved.

    Only the ranges that the plan asks for are read, up to 256 MiB at once: the next ones come from
    storage while the last are copied into their tensors. `transfers` tells what happened.
    """

    def __init__(self, path: DcpLocation, writer: WriterLike) -> None:
        """`writer`: a Writer, a name, or the path of a config. Raises UsageError and its kin."""
        super().__init__(path, writer)
        self.load_id = str(uuid.uuid4())
        """Identifies the newest load; the metadata that `read_metadata` returns records it."""
        self._places: dict[Any, _StorageInfo] = {}

    def reset(self, checkpoint_id: DcpLocation | None = None) -> None:
        """Begin a new load, from another place if one is given."""
        self._begin_at(checkpoint_id)
        self.load_id = str(uuid.uuid4())
        self._places = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata, unpickled as stock DCP does: load only what you trust.

        Raises TransferError (ENOENT) where there is no checkpoint, or only one that was not
        completed; DataMismatchError when it cannot be read.
        """
        del args
        name = metadata_name(kwargs.get("rank"))
        with self._files.source(name) as source:
            try:
                metadata = pickle.load(cast(IO[bytes], source))
            except _DAMAGE as error:
                raise DataMismatchError(
                    f"{self._files.path(name)}: no metadata of DCP ({error})"
                ) from error
        if not isinstance(metadata, Metadata):
            raise DataMismatchError(f"{self._files.path(name)}: no metadata of DCP")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Is told by DCP where everything is."""
        del is_coordinator, args, kwargs
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to prepare."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to prepare."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill everything that the plan asks of this rank.

        Raises DataMismatchError when a file is not what the metadata says, TransferError.
        """
        wanted: dict[str, list[_Item]] = defaultdict(list)
        for request in plan.items:
            place = self._places[request.storage_index]
            if getattr(place, "transform_descriptors", None):
                raise UsageError(
                    f"{self.checkpoint_id}: {request.storage_index.fqn!r} went through a stream "
                    f"extension {place.transform_descriptors} when it was saved; load it with "
                    "torch's FileSystemReader"
                )
            wanted[place.relative_path].append(_Item(request=request, place=place))
        for name, items in wanted.items():
            self._read_file(name, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, name: str, items: list[_Item], planner: LoadPlanner) -> None:
        with self._files.source(name) as source:
            size = source.seek(0, io.SEEK_END)
        if any(item.stop > size for item in items):
            raise DataMismatchError(
                f"{self._files.path(name)}: has {size} bytes, the metadata knows more"
            )
        if not size:
            return
        # Address space for the whole file; only what is read takes memory, until it is dropped.
        memory = fresh_pages(size, huge=not host_takes_free_memory())
        image = FileImage.of(name, [memory])

        def fetch(run: _Run) -> None:
            self.transfers.append(
                self._files.writer.read(
                    image, self._files.location, start=run.start, stop=min(run.stop, size)
                )
            )

        ahead: Channel[_Run] = Channel(lambda: ahead.serve(fetch), name="iobench-dcp", limit=2)
        leases = [Lease(run) for run in _runs(items)]
        try:
            ahead.submit(leases[0])
            for lease, following in itertools.zip_longest(leases, leases[1:]):
                ahead.wait(lease)
                run = lease.item
                done = run.stop
                if following:
                    ahead.submit(following)
                    done = min(done, following.item.start)
                for item in run.items:
                    data = memory[item.start : item.stop]
                    _fill(item.request, data, f"{self._files.path(name)}, {item.start}", planner)
                linux.give_up_pages(memory.ctypes.data + run.start, done - run.start)
        finally:
            ahead.close(drop=True)


@dataclass(frozen=True, kw_only=True)
class _Item:
    """What is asked for, and where it stands."""

    request: ReadItem
    place: _StorageInfo

    @property
    def start(self) -> int:
        return int(self.place.offset)

    @property
    def stop(self) -> int:
        return int(self.place.offset + self.place.length)


@dataclass(kw_only=True)
class _Run:
    """Items that are read together: whole pages from `start` to `stop`."""

    start: int
    stop: int
    items: list[_Item]


def _runs(items: Sequence[_Item]) -> Iterator[_Run]:
    """All items by their place, those near each other together.

    Items stand close together, so a run may begin with the page that the one before ends with.
    """
    run: _Run | None = None
    for item in sorted(items, key=lambda item: item.start):
        start, stop = item.start - item.start % linux.PAGE, -(-item.stop // linux.PAGE) * linux.PAGE
        if run and start - run.stop < _GAP and max(stop, run.stop) - run.start <= _AT_ONCE:
            run.stop = max(stop, run.stop)
            run.items.append(item)
            continue
        if run:
            yield run
        run = _Run(start=start, stop=stop, items=[item])
    if run:
        yield run


def _fill(request: ReadItem, data: Bytes, where: str, planner: LoadPlanner) -> None:
    if request.type == LoadItemType.BYTE_IO:
        planner.load_bytes(request, io.BytesIO(data.tobytes()))
        return
    saved = torch_file.view(data, where)
    if not isinstance(saved, torch.Tensor):
        raise DataMismatchError(f"{where}: holds a {type(saved).__name__} and no tensor")
    part = narrow_tensor_by_index(saved, request.storage_offsets, request.lengths)
    target = planner.resolve_tensor(request).detach()
    if target.size() != part.size():
        raise DataMismatchError(
            f"{where}: {request.storage_index.fqn!r} has the shape {tuple(part.shape)}, "
            f"{tuple(target.shape)} is wanted"
        )
    target.copy_(part)
    planner.commit_tensor(request, target)
