"""The work of `iobench.torch` and `iobench exec`: torch.save and torch.load using a writer.

Calls that a writer cannot make exactly like stock torch raise StockOnly before anything is written.
`torch_dropins` has the functions with the stock signatures.
"""

from __future__ import annotations

import pickle
import time
import types
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import IO, Any, cast

import numpy as np
import torch
from torch.serialization import DEFAULT_PROTOCOL, default_restore_location
from torch.utils.serialization import config

from iobench import linux
from iobench.errors import DataMismatchError, SaveError, TransferError
from iobench.formats import torch_file, torch_image
from iobench.formats.file_memory import FileMemory
from iobench.formats.inspected_file import InspectedFile
from iobench.integrations.stock_path import NotPicklable, StockOnly, StockPath, path_of
from iobench.writers.base import Writer
from iobench.writers.image import Bytes
from iobench.writers.source import ImageSource
from iobench.writers.transfer import Transfer

__all__ = ["load", "prepare_save"]

_Write = Callable[[], Transfer]


def prepare_save(
    writer: Writer,
    obj: object,
    f: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
) -> _Write:
    """Describe the file that `torch.save` would make. Return a function that writes it durably.

    Raises StockOnly, and NotPicklable with the error of pickling. The returned function raises
    SaveError, which is a RuntimeError like torch's error, and UnavailableError.
    """
    began = time.perf_counter()
    path = path_of(f)
    if pickle_module is not pickle:
        raise StockOnly("another pickle module")
    if torch.serialization._serialization_tls.skip_data:
        raise StockOnly("torch.serialization.skip_data is on")
    if not _use_new_zipfile_serialization:
        raise StockOnly("the file format before torch 1.6")
    target = StockPath.of(path, writer, stock_renames=False)
    image = torch_image.image(
        target.name,
        obj,
        target.directory,
        crc=torch.serialization.get_crc32_options(),
        pickle_module=_PICKLE,
        pickle_protocol=pickle_protocol,
        _disable_byteorder_record=_disable_byteorder_record,
    )
    if image is None:
        raise StockOnly(
            "its storages are on a device other than CUDA, it has tensors whose data torch cannot "
            "skip, or this torch writes different bytes"
        )
    target.check_room(image.size_bytes)
    serialize_s = time.perf_counter() - began

    def write() -> Transfer:
        try:
            moved = writer.write(image, target.directory)
        except TransferError as error:
            raise SaveError.of(error) from error
        return replace(
            moved,
            elapsed_s=moved.elapsed_s + serialize_s,
            phases_s={"serialize": serialize_s, **moved.phases_s},
        )

    return write


class _Pickler(pickle.Pickler):
    """Marks errors of pickling, to distinguish them from all other errors before the write.

    Stock torch opens the file before it pickles: it would fail too, after truncating the old file.
    """

    def dump(self, obj: Any) -> None:
        try:
            super().dump(obj)
        except Exception as error:
            if "skip_data" in str(error):  # torch refuses objects whose data it cannot skip
                raise
            raise NotPicklable(error) from error


_PICKLE = types.SimpleNamespace(Pickler=_Pickler, __name__=pickle.__name__)
"""The module `pickle` with that Pickler; torch reads the module's name."""


def load(
    writer: Writer,
    f: Any,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    **pickle_load_args: Any,
) -> tuple[Any, Transfer]:
    """Return what `torch.load` returns, and the Transfer of one parallel read of the whole file.

    Stock torch unpickles the object from memory, so `weights_only`, safe globals and warnings are
    torch's own. Each storage has memory of its own from torch's allocator. Raises StockOnly, and
    every other error unchanged, which the stock function can handle.
    """
    began = time.perf_counter()
    path = path_of(f)
    _check_load(path, map_location, mmap)
    target = StockPath.of_stored(path, writer)
    records, memory, storages = _allocate(target, writer)
    image = memory.image(target.name)
    parse_s = time.perf_counter() - began
    moved = writer.read(image, target.directory)
    began = time.perf_counter()
    source = ImageSource(image)
    if torch_file.storage_places(path, source)[0] != records:
        raise DataMismatchError(f"{path}: was changed while it was read; load it again")
    state = _unpickle(
        source,
        storages,
        _restore(map_location),
        pickle_module=pickle_module,
        weights_only=weights_only,
        **pickle_load_args,
    )
    parse_s += time.perf_counter() - began
    return state, replace(
        moved,
        elapsed_s=moved.elapsed_s + parse_s,
        phases_s={"parse": parse_s, **moved.phases_s},
    )


def _check_load(path: str, map_location: Any, mmap: bool | None) -> None:
    """Raise StockOnly for calls that read no data now, or that stock passes to safetensors."""
    if path.endswith(".safetensors"):
        raise StockOnly("a safetensors file, which stock passes to safetensors.torch.load_file")
    if mmap or (mmap is None and config.load.mmap):
        raise StockOnly("mmap=True reads the data later")
    if torch.serialization._serialization_tls.skip_data or _loads_no_data(map_location):
        raise StockOnly("the call loads no data")


def _unpickle(
    source: ImageSource,
    storages: list[torch.UntypedStorage],
    restore: Callable[[Any, str], Any],
    **options: Any,
) -> Any:
    """Let torch unpickle the file in `source`, with `storages` in place of those it would read.

    `torch.serialization.skip_data` makes torch.load allocate storages without reading them. It asks
    `map_location` for each one in the order of the file; there the filled one replaces it.
    """
    left = iter(storages)

    def storage(described: Any, location: str) -> Any:
        if not described.nbytes():
            return restore(described, location)
        found = next(left, None)
        if found is None or found.nbytes() != described.nbytes():
            raise StockOnly("its storages are not in the order that torch.save writes")
        return restore(found, location)

    with torch.serialization.skip_data():
        source.seek(0)
        state = torch.load(cast(IO[bytes], source), map_location=storage, mmap=False, **options)
    if next(left, None) is not None:
        raise StockOnly("its storages are not in the order that torch.save writes")
    return state


def _allocate(
    target: StockPath, writer: Writer
) -> tuple[list[tuple[int, int]], FileMemory, list[torch.UntypedStorage]]:
    """Return the storages' byte ranges in the file, memory for the file, and the storages in it."""
    storages: list[torch.UntypedStorage] = []

    def allocate(size_bytes: int) -> Bytes:
        storage = torch.empty(size_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
        storages.append(storage)
        return np.asarray(_StorageArray(storage))

    with closing(writer.open_source(target.path)) as source:
        records, size = torch_file.storage_places(target.path, InspectedFile(source))
    memory = FileMemory(target.path, size, allocate)
    for start, stop in records:
        memory.take(start, stop, 1)
    return records, memory, storages


def _loads_no_data(map_location: Any) -> bool:
    """Whether torch.load makes tensors without data: fake ones, or those of the meta device."""
    if torch._guards.detect_fake_mode(None) is not None:
        return True
    if isinstance(map_location, str):
        return map_location.partition(":")[0] == "meta"
    return isinstance(map_location, torch.device) and map_location.type == "meta"


def _restore(map_location: Any) -> Callable[[Any, str], Any]:
    """Return the function that puts a filled storage where torch.load would put it.

    It takes the storage and the location that it was saved from.
    """
    default: Callable[[Any, str], Any] = default_restore_location

    def restore(storage: Any, location: str) -> Any:
        if isinstance(map_location, dict):
            return default(storage, map_location.get(location, location))
        if isinstance(map_location, (str, torch.device)):
            return default(storage, str(map_location))
        if map_location is not None:
            found = map_location(storage, location)
            if found is not None:
                return found
        return default(storage, location)

    return restore


class _StorageArray:
    """The array interface of a storage's bytes. `Tensor.numpy` would make the storage unresizable.

    It holds the storage, so that numpy's views keep the memory alive.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.__array_interface__ = linux.array_interface(storage.data_ptr(), storage.nbytes())
