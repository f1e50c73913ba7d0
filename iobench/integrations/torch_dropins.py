"""`save` and `load` of `iobench.torch`: drop-in replacements of torch.save and torch.load.

They have the stock signatures plus `writer`. `prepare_save` and `load_by` do the work, also for
`iobench exec`. They raise Unsupported for calls that a writer cannot make exactly like stock torch;
nothing is written then, and stock torch makes the call.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import time
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.serialization import DEFAULT_PROTOCOL
from torch.utils.serialization import config

from iobench.errors import DataMismatchError, SaveError, TransferError
from iobench.formats import torch_image
from iobench.formats.file_memory import InspectedFile
from iobench.formats.tensors import storages_bytes
from iobench.formats.torch_file import TorchIndex, unpickled
from iobench.integrations.default_writer import chosen_writer
from iobench.integrations.replacing import bypass
from iobench.integrations.stock_path import (
    NotPicklable,
    StockCall,
    StockPath,
    Unsupported,
    path_of,
)
from iobench.writers.base import Writer
from iobench.writers.config import WriterLike
from iobench.writers.image import Bytes, FileImage
from iobench.writers.transfer import Transfer

_Write = Callable[[], Transfer]


def save(
    obj: object,
    f: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    writer: WriterLike | None = None,
) -> None:
    """Save like `torch.save`, using `writer`: the same file, byte for byte, durable on return.

    The new file appears complete. Until then, and when this function fails, the old file stays.

    Stock torch saves what a writer cannot save in the same way: to file objects, with other pickle
    modules and formats, over files with hard links or permissions of their own, to devices and
    pipes. For a path the logger `iobench` reports this fallback. Stock torch cannot write to
    buckets, so the same call raises UsageError there.

    Raises SaveError, which is a RuntimeError and an OSError, UnavailableError, and what pickling
    raises.
    """
    options = (pickle_module, pickle_protocol)
    flags = (_use_new_zipfile_serialization, _disable_byteorder_record)
    call = StockCall("torch.save", f, lambda: torch.save(obj, f, *options, *flags))
    call.save(lambda: prepare_save(chosen_writer(writer), obj, f, *options, *flags))


def load(
    f: Any,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    writer: WriterLike | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load like `torch.load`; `writer` reads the file: in parallel, and without the page cache
    if that is how it works.

    Torch unpickles the object and decides what `weights_only` admits. Stock torch loads what the
    writer cannot load in the same way (file objects, `mmap=True`, files that are damaged or of
    other formats), and raises its own errors. For a path the logger `iobench` reports this
    fallback.

    Stock torch cannot read buckets. There this function raises FileNotFoundError if the object does
    not exist, UsageError for calls that need stock torch, and otherwise the error itself
    (TransferError, UnavailableError, DataMismatchError).
    """
    given: dict[str, Any] = {"weights_only": weights_only, "mmap": mmap, **pickle_load_args}
    chosen = chosen_writer(writer)
    call = StockCall("torch.load", f, lambda: torch.load(f, map_location, pickle_module, **given))
    return call.load(lambda: load_by(chosen, f, map_location, pickle_module, **given))


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

    Raises Unsupported, and NotPicklable with the error of pickling. The returned function raises
    SaveError, which is a RuntimeError like torch's error, and UnavailableError.
    """
    began = time.perf_counter()
    path = path_of(f)
    if pickle_module is not pickle:
        raise Unsupported("another pickle module")
    if torch.serialization._serialization_tls.skip_data:
        raise Unsupported("torch.serialization.skip_data is on")
    if not _use_new_zipfile_serialization:
        raise Unsupported("the file format before torch 1.6")
    with bypass():
        if not torch_image.is_like_stock():
            raise Unsupported("this torch writes different bytes")
    describe = functools.partial(
        torch_image.image,
        state=obj,
        crc=torch.serialization.get_crc32_options(),
        pickle_module=_PICKLE,
        pickle_protocol=pickle_protocol,
        _disable_byteorder_record=_disable_byteorder_record,
    )
    try:
        target = StockPath.of(path, writer, stock_renames=False)
    except Unsupported:
        if os.path.isfile(path):  # stock truncates it before it pickles, so pickle once before
            describe(os.path.basename(path), target=os.path.dirname(path))
        raise
    image = describe(target.name, target=target.directory)
    if image is None:
        raise Unsupported("its storages are on a device other than CUDA")
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
            raise NotPicklable(error) from error


_PICKLE = types.SimpleNamespace(Pickler=_Pickler, __name__=pickle.__name__)
"""The module `pickle` with that Pickler; torch reads the module's name."""


def load_by(
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
    torch's own. Each storage has memory of its own from torch's allocator. Raises Unsupported, and
    every other error unchanged, which the stock function can handle.
    """
    began = time.perf_counter()
    path = path_of(f)
    _check_load(path, map_location, mmap)
    target = StockPath.of_stored(path, writer)
    only = _only_weights(weights_only, pickle_module, pickle_load_args)
    with InspectedFile.opened(path, writer) as source:
        index = TorchIndex.read(path, source)
        pickled = index.read_pickle(source)
    image, storages = _allocate(target.name, index)
    parse_s = time.perf_counter() - began
    moved = writer.read(image, target.directory)
    began = time.perf_counter()
    source.check(path, image)
    restore: Any = torch.serialization._get_restore_location(map_location)

    def storage_of(key: str, size_bytes: int, location: str) -> Any:
        storage = storages[key] if size_bytes else _new_storage(0)
        if storage.nbytes() != size_bytes:
            raise DataMismatchError(f"{path}: storage {key} has another size than its tensors")
        return restore(storage, location)

    state = unpickled(
        pickled,
        storage_of,
        weights_only=only,
        map_location=map_location,
        pickle_module=pickle_module or pickle,
        **pickle_load_args,
    )
    parse_s += time.perf_counter() - began
    return state, replace(
        moved,
        elapsed_s=moved.elapsed_s + parse_s,
        phases_s={"parse": parse_s, **moved.phases_s},
    )


def _check_load(path: str, map_location: Any, mmap: bool | None) -> None:
    """Raise Unsupported for calls that read no data now, or that stock passes to safetensors."""
    if path.endswith(".safetensors"):
        raise Unsupported("a safetensors file, which stock passes to safetensors.torch.load_file")
    if mmap or (mmap is None and config.load.mmap):
        raise Unsupported("mmap=True reads the data later")
    if torch.serialization._serialization_tls.skip_data or _loads_no_data(map_location):
        raise Unsupported("the call loads no data")


def _only_weights(weights_only: bool | None, pickle_module: Any, options: dict[str, Any]) -> bool:
    """Return whether torch.load restricts the pickle, which also depends on the environment.

    Warnings and errors about the arguments are torch's.
    """
    with bypass():
        try:
            torch.load(
                io.BytesIO(_refused()), None, pickle_module, weights_only=weights_only, **options
            )
        except pickle.UnpicklingError:
            return True
    return False


class _Refused:
    """An object that torch.load does not unpickle with `weights_only`."""


@functools.cache
def _refused() -> bytes:
    file = io.BytesIO()
    torch.save(_Refused(), file)
    return file.getvalue()


def _allocate(name: str, index: TorchIndex) -> tuple[FileImage, dict[str, torch.UntypedStorage]]:
    """Return the image of the file that fills its storages, and these by key."""
    keys, starts, stops = index.filled(), index.starts, index.stops
    storages = [_new_storage(stops[key] - starts[key]) for key in keys]
    between = np.empty(index.size_bytes - sum(stops) + sum(starts), dtype=np.uint8)
    parts: list[Bytes] = []
    position = used = 0
    for key, memory in zip(keys, storages_bytes(storages), strict=True):
        length = starts[key] - position
        parts += (between[used : used + length], memory)
        used += length
        position = stops[key]
    image = FileImage.of_parts(name, [*parts, between[used:]])
    return image, dict(zip(map(str, keys), storages, strict=True))


def _new_storage(size_bytes: int) -> torch.UntypedStorage:
    """Return host memory from torch's allocator, whatever the default device is."""
    return torch.UntypedStorage(size_bytes, device="cpu")


def _loads_no_data(map_location: Any) -> bool:
    """Whether torch.load makes tensors without data: fake ones, or those of the meta device."""
    if torch._guards.detect_fake_mode(None) is not None:
        return True
    if isinstance(map_location, str):
        return map_location.partition(":")[0] == "meta"
    return isinstance(map_location, torch.device) and map_location.type == "meta"
