"""`torch.save` and `torch.load` over a writer, each in two steps: what may be refused, the bytes.

`iobench.torch` and `iobench exec` are made of these. What they cannot do exactly as stock torch
does they refuse with NotOurs, before anything is written.
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

from iobench.errors import DataMismatchError, SaveError, TransferError
from iobench.formats import torch_file, torch_image
from iobench.formats.file_memory import FileMemory
from iobench.formats.inspected_file import InspectedFile
from iobench.integrations.stock_path import NotOurs, NotPicklable, StockPath, path_of
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
    """Describe the file that `torch.save` would make; what is returned writes it, durable.

    Raises NotOurs, and NotPicklable with what pickling raised. The returned function raises
    SaveError, which is a RuntimeError as torch's is, and UnavailableError.
    """
    began = time.perf_counter()
    path = path_of(f)
    if pickle_module is not pickle:
        raise NotOurs("another pickle module")
    if torch.serialization._serialization_tls.skip_data:
        raise NotOurs("torch.serialization.skip_data is on")
    if not _use_new_zipfile_serialization:
        raise NotOurs("the format before torch 1.6")
    place = StockPath.of(path, writer, stock_renames=False)
    image = torch_image.image(
        place.name,
        obj,
        place.directory,
        crc=torch.serialization.get_crc32_options(),
        pickle_module=_TELLING,
        pickle_protocol=pickle_protocol,
        _disable_byteorder_record=_disable_byteorder_record,
    )
    if image is None:
        raise NotOurs(
            "its storages are on a device, it has tensors whose data torch cannot leave out, "
            "or this torch writes another file"
        )
    place.check_room(image.size_bytes)
    serialize_s = time.perf_counter() - began

    def write() -> Transfer:
        try:
            moved = writer.write(image, place.directory)
        except TransferError as error:
            raise SaveError.of(error) from error
        return replace(
            moved,
            elapsed_s=moved.elapsed_s + serialize_s,
            phases_s={"serialize": serialize_s, **moved.phases_s},
        )

    return write


class _Pickler(pickle.Pickler):
    """Tells an object that cannot be pickled from all else that may go wrong beforehand.

    Stock torch opens the file before it pickles: it would fail too, and truncate what is there.
    """

    def dump(self, obj: Any) -> None:
        try:
            super().dump(obj)
        except Exception as error:
            if "skip_data" in str(error):  # torch's refusal of what has no storages
                raise
            raise NotPicklable(error) from error


_TELLING = types.SimpleNamespace(Pickler=_Pickler, __name__=pickle.__name__)


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
    """What `torch.load` would return, its storages filled by one parallel read of the whole file.

    The object is then unpickled by stock torch from memory, so `weights_only`, its safe globals and
    warnings are torch's own. Storages are memory of torch's own allocator, one each. Raises
    NotOurs, and what else goes wrong as it is: the stock function knows what to make of it.
    """
    began = time.perf_counter()
    path = path_of(f)
    if path.endswith(".safetensors"):
        raise NotOurs("a safetensors file, which stock hands to safetensors.torch.load_file")
    if mmap or (mmap is None and config.load.mmap):
        raise NotOurs("mmap=True reads nothing yet")
    if torch.serialization._serialization_tls.skip_data or _no_data_wanted(map_location):
        raise NotOurs("no data is wanted")
    place = StockPath.of_stored(path, writer)
    records, memory, storages = _room(place, writer)
    image = memory.image(place.name)
    parse_s = time.perf_counter() - began
    moved = writer.read(image, place.directory)
    began = time.perf_counter()
    source = ImageSource(image)
    if torch_file.storage_places(path, source)[0] != records:
        raise DataMismatchError(f"{path}: was changed while it was read; load it again")
    restore = _restore(map_location)
    left = iter(storages)

    def storage(described: Any, location: str) -> Any:
        if not described.nbytes():
            return restore(described, location)
        found = next(left, None)
        if found is None or found.nbytes() != described.nbytes():
            raise NotOurs("its storages are not in the order that torch.save writes")
        return restore(found, location)

    with torch.serialization.skip_data():
        source.seek(0)
        state = torch.load(
            cast(IO[bytes], source),
            map_location=storage,
            pickle_module=pickle_module,
            weights_only=weights_only,
            mmap=False,
            **pickle_load_args,
        )
    if next(left, None) is not None:
        raise NotOurs("its storages are not in the order that torch.save writes")
    parse_s += time.perf_counter() - began
    return state, replace(
        moved,
        elapsed_s=moved.elapsed_s + parse_s,
        phases_s={"parse": parse_s, **moved.phases_s},
    )


def _room(
    place: StockPath, writer: Writer
) -> tuple[list[tuple[int, int]], FileMemory, list[torch.UntypedStorage]]:
    """Where the storages stand in the file, memory for all of it, and the storages on that."""
    storages: list[torch.UntypedStorage] = []

    def allocate(size_bytes: int) -> Bytes:
        storage = torch.empty(size_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
        storages.append(storage)
        return np.asarray(_Seen(storage))

    with closing(writer.open_source(place.path)) as source:
        records, size = torch_file.storage_places(place.path, InspectedFile(source))
    memory = FileMemory(place.path, size, allocate)
    for start, stop in records:
        memory.take(start, stop, 1)
    return records, memory, storages


def _no_data_wanted(map_location: Any) -> bool:
    if torch._guards.detect_fake_mode(None) is not None:
        return True
    if isinstance(map_location, str):
        return map_location.partition(":")[0] == "meta"
    return isinstance(map_location, torch.device) and map_location.type == "meta"


def _restore(map_location: Any) -> Callable[[Any, str], Any]:
    """Where torch would put a storage, given it with its data and where it was saved from."""

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


class _Seen:
    """A storage as numpy sees it. `Tensor.numpy` would leave it unable to grow ever after."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage  # kept as long as it is seen
        self.__array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }
