"""StorageWriter: `torch.distributed.checkpoint.save` and `async_save` through a writer."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import io
import os
import pickle
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from math import prod
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter as StockStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from iobench.errors import TargetError, UsageError
from iobench.integrations.dcp_files import DcpLocation, DcpStorage
from iobench.integrations.default_writer import WriterLike
from iobench.writers.blocks import interpreter_end
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.transfer import Meter, Transfer

__all__ = ["METADATA", "StorageWriter", "metadata_name"]

METADATA = ".metadata"

_LEAVING_S = 5.0


def metadata_name(rank: int | None) -> str:
    """The metadata of the whole checkpoint, or of one rank that saved without collectives."""
    return METADATA if rank is None else f"__{rank}{METADATA}"


class StorageWriter(DcpStorage, StockStorageWriter, BlockingAsyncStager):
    """Saves a checkpoint that stock `FileSystemReader` reads, every file by the writer's I/O path.

    When `dcp.save` returns, and when the future of `dcp.async_save` is done, all of it is durable:
    each file is synced before it gets its name, and `.metadata`, the commit, comes last. A save
    that fails or is killed leaves no `.metadata`; whole files of it may stay. `transfers` tells
    what happened to this rank's files. An interpreter that ends waits for the last `async_save` (in
    a thread), and ends with code 120 and a message if it failed.

    Overwriting removes the old `.metadata` first: killed in between, there is no checkpoint rather
    than a mix of two. Save to a new place to keep the old one until the new one is complete.
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

        Each rank writes `thread_count` files at a time, its tensors dealt out evenly by size, or
        with `single_file_per_rank=False` one file for each tensor. `cache_staged_state_dict`: see
        torch's BlockingAsyncStager. Raises UsageError.
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
        self._own_rank: int | None = None  # of a save without collectives
        self._finishes = True

    def reset(self, checkpoint_id: DcpLocation | None = None) -> None:
        """Begin a new save, at another place if one is given."""
        self._begin_at(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Is told by DCP how it saves."""
        del args
        _newest.begin(self.checkpoint_id)
        self._own_rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")
        self._finishes = is_coordinator or self._own_rank is not None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Raises TargetError where there is a checkpoint and `overwrite` is off."""
        with _newest.step():
            self._make_way(metadata_name(self._own_rank))
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

    def _make_way(self, name: str) -> None:
        if not self._files.exists(name):
            return
        if not self._overwrite:
            raise TargetError(
                f"{self.checkpoint_id}: there is a checkpoint already; choose another place, or "
                "pass overwrite=True"
            )
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            self._files.remove(name)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, each durable and under its name on return."""
        prefix: str = plan.storage_data.prefix
        groups = [[item] for item in plan.items]
        if self._single_file_per_rank:
            groups = _dealt_out(plan.items, self._thread_count)
        files: dict[int, tuple[Transfer, list[WriteResult]]] = {}

        def work(numbers: Blocks, _: Meter) -> None:
            for number, _end in numbers:
                name = f"{prefix}{number}{DEFAULT_SUFFIX}"
                files[number] = self._write_file(name, groups[number], planner)

        with _newest.step(last=not self._finishes):
            threads = max(1, min(self._thread_count, len(groups)))
            run_workers(threads, Blocks(0, len(groups), 1), work, Meter(), apart=True)
        in_order = [files[number] for number in range(len(groups))]
        self.transfers += [transfer for transfer, _ in in_order]
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for _, results in in_order for result in results])
        return done

    def _write_file(
        self, name: str, items: Sequence[WriteItem], planner: SavePlanner
    ) -> tuple[Transfer, list[WriteResult]]:
        results = []
        expected = sum(_size_bytes(item) for item in items)
        try:
            with self._files.writer.open(self._files.path(name), expected or None) as stream:
                for item in items:
                    start = stream.tell()
                    _write_item(planner.resolve_data(item), cast(IO[bytes], stream))
                    length = stream.tell() - start
                    place = _StorageInfo(name, start, length)
                    results.append(
                        WriteResult(index=item.index, size_in_bytes=length, storage_data=place)
                    )
        except RuntimeError as error:
            if stream.failure is None:
                raise
            raise stream.failure from error  # torch reports its own end of file instead
        assert stream.transfer is not None
        return stream.transfer, results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, which makes it a checkpoint."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for all_ in results for one in all_}
        metadata.storage_meta = self.storage_meta()
        name = metadata_name(self._own_rank)
        with (
            _newest.step(last=True),
            self._files.writer.open(self._files.path(name)) as stream,
        ):
            pickle.dump(metadata, cast(IO[bytes], stream))
        assert stream.transfer is not None
        self.transfers.append(stream.transfer)

    def storage_meta(self) -> StorageMeta:
        """What DCP notes down about this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)


class _Newest:
    """The newest save that a thread of DCP makes, whose future the script may never look at.

    CPython joins that thread before it ends; a signal's handler that raises SystemExit ends the
    join, and here it is done again. A failure is forgotten when the next save begins.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._place = self._failure = ""

    def begin(self, place: DcpLocation) -> None:
        thread, self._failure = threading.current_thread(), ""
        if thread is not threading.main_thread():
            self._thread, self._place, self._over = thread, os.fspath(place), threading.Event()
            interpreter_end.at_end(self, _Newest._at_end)

    @contextlib.contextmanager
    def step(self, *, last: bool = False) -> Iterator[None]:
        """A step of the save, perhaps this rank's last one."""
        own = threading.current_thread() is self._thread
        try:
            yield
        except BaseException as error:
            if own:
                self._failure = repr(error)
                self._over.set()
            raise
        if own and last:
            self._over.set()

    def _at_end(self) -> None:
        thread = self._thread
        assert thread is not None
        if not thread.daemon:
            # No join: CPython 3.11 and 3.12 take a thread for ended once one was interrupted.
            while thread in threading.enumerate() and not self._over.wait(0.05):
                pass
            # Killed while it is still in torch's C++, it would abort the process.
            until_s = time.monotonic() + _LEAVING_S
            while thread in threading.enumerate() and time.monotonic() < until_s:
                time.sleep(0.01)
        if self._failure:
            interpreter_end.lost(f"async_save to {self._place} failed: {self._failure}")
        elif not self._over.is_set():
            interpreter_end.lost(f"async_save to {self._place} did not end")


_newest = _Newest()


class _InMiddle(io.RawIOBase):
    """A stream to whose end one item is added: its serializer's flush is not the file's."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._stream.write(data)


def _write_item(data: torch.Tensor | io.BytesIO, stream: IO[bytes]) -> None:
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
        return
    tensor = data.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save would save all of the storage
    with _InMiddle(stream) as end:
        torch.save(tensor, cast(IO[bytes], end))


def _size_bytes(item: WriteItem) -> int:
    """About what the item takes in a file; 0 for bytes, whose number is not known yet."""
    if item.type == WriteItemType.BYTE_IO:
        return 0
    assert item.tensor_data is not None
    itemsize: int = item.tensor_data.properties.dtype.itemsize
    return prod(item.tensor_data.chunk.sizes) * itemsize


def _dealt_out(items: Sequence[WriteItem], files: int) -> list[list[WriteItem]]:
    """The items in up to `files` groups of about equal size, the largest first in each."""
    groups: list[list[WriteItem]] = [[] for _ in range(min(files, len(items)) or 1)]
    heap = [(0, number) for number in range(len(groups))]
    for item in _by_size(items):
        size, number = heapq.heappop(heap)
        groups[number].append(item)
        heapq.heappush(heap, (size + max(1, _size_bytes(item)), number))
    return groups


def _by_size(items: Sequence[WriteItem]) -> Iterator[WriteItem]:
    yield from sorted(items, key=_size_bytes, reverse=True)
