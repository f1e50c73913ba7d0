"""torch files: the stock `torch.save` zip, written without copying tensors, read in parallel.

TorchIndex: positions of the pickle and the storages in a torch file. unpickled: its object.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import struct
import sys
import time
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Self, cast

import torch
from torch.serialization import LoadEndianness, get_default_load_endianness
from torch.storage import TypedStorage

from iobench.errors import DataMismatchError, IobenchError, TransferError
from iobench.formats import torch_image
from iobench.formats.file_memory import FileMemory, InspectedFile
from iobench.formats.tensors import Allocate, OnDevice, allocate_on, flat_tensor
from iobench.formats.torch_zip import ZipDirectory
from iobench.writers.base import ImageSource, Source, Writer
from iobench.writers.config import WriterLike, writer_of
from iobench.writers.image import AnyMemory, Bytes, FileImage
from iobench.writers.transfer import Transfer

__all__ = ["load", "prepare", "save", "view"]

_WIDEST = 16  # bytes of the widest value, complex128; torch.save puts storages at multiples of 64
_HOST = torch.device("cpu")
_OTHER = LoadEndianness.BIG if sys.byteorder == "little" else LoadEndianness.LITTLE

DAMAGE = (
    *(RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, EOFError),
    *(AssertionError, zipfile.BadZipFile, struct.error),
)
"""Exceptions of zip readers and torch for damaged files, found by damaging thousands of files."""


def save(
    state: Any,
    path: str,
    target: str | Path,
    writer: WriterLike,
    *,
    crc: bool = True,
    durable: bool = True,
    sync_directory: bool = True,
    **options: Any,
) -> Transfer:
    """`torch.save(state, target/path, **options)` through `writer`; see `Writer.write`.

    The file is identical to stock torch's. The storages are not copied, and their CRC32s are
    computed while `writer` reads them. `crc=False` leaves the CRC32 out of the zip; torch does not
    check it on load. `torch_image` has no image of some states, such as storages outside host and
    CUDA memory. Their file is streamed: it is always durable, torch computes the CRC32 at about
    1.5 GiB/s, and its zip folder is named `archive`, like that of every stream. The phase
    `serialize` is the time before the first byte is written.

    Raises TransferError, and passes on what pickling raises. Then nothing is published.
    """
    writer = writer_of(writer)
    began = time.perf_counter()
    described = torch_image.image(path, state, target, crc=crc, **options)
    if described is None:
        return _stream(state, os.path.join(target, path), writer, crc, options)
    serialize_s = time.perf_counter() - began
    written = writer.write(described, target, durable=durable, sync_directory=sync_directory)
    return replace(
        written,
        elapsed_s=written.elapsed_s + serialize_s,
        phases_s={"serialize": serialize_s, **written.phases_s},
    )


def _stream(state: Any, file: str, writer: Writer, crc: bool, options: dict[str, Any]) -> Transfer:
    stream = writer.open(file)
    with stream:
        try:
            with torch_image.crc32_setting(crc):
                torch.save(state, cast(IO[bytes], stream), **options)
        except Exception as error:
            if stream.failure is not None and stream.failure is not error:
                raise stream.failure from error  # torch hides it behind an error of its own
            raise
    assert stream.transfer is not None
    return stream.transfer


def prepare(
    path: str,
    target: str | Path,
    writer: Writer | None = None,
    *,
    allocate: Allocate | None = None,
    weights_only: bool = True,
) -> tuple[Any, FileImage]:
    """Return the object in the torch file `target/path` without data, and the image that fills it.

    torch unpickles only the object. Its storages share one piece of memory in the layout of the
    file, which direct reads fill without a copy; see `FileMemory`.
    With `allocate`, each storage's memory comes from one call of it, in the order of the keys;
    empty storages need none. Without it everything is on the CPU. `writer` opens the file to
    inspect it; without a writer the file must be in a mounted file system.

    Raises DataMismatchError for a file that is damaged or not a stock torch zip, and TransferError.
    With `weights_only`, passes on pickle.UnpicklingError for what torch refuses to unpickle. Only
    the sizes of the storages are compared here; checksums of a manifest must prove their contents.
    """
    file = os.path.join(target, path)
    with InspectedFile.opened(file, writer) as source:
        return _prepare(path, file, source, allocate, weights_only)


def _prepare(
    path: str, file: str, source: Source, allocate: Allocate | None, weights_only: bool
) -> tuple[Any, FileImage]:
    index = TorchIndex.read(file, source)
    memory = FileMemory(file, index.size_bytes, allocate)
    state = _object_of(
        *(file, source, index, lambda start, stop: memory.take(start, stop, _WIDEST)),
        weights_only=weights_only,
        device=allocate.device if isinstance(allocate, OnDevice) else _HOST,
    )
    return state, memory.image(path)


def _object_of(
    file: str,
    source: Source,
    index: TorchIndex,
    take: Callable[[int, int], AnyMemory],
    *,
    weights_only: bool,
    device: torch.device = _HOST,
) -> Any:
    """Return the object. `take(start, stop)` gives each storage; empty ones are on `device`."""
    places = zip(index.starts, index.stops, strict=True)
    left = {str(key): place for key, place in enumerate(places) if place[0] < place[1]}

    def storage_of(key: str, size_bytes: int, _location: str) -> torch.UntypedStorage:
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        start, stop = left.pop(key, (0, 0))
        if size_bytes != stop - start:
            raise other
        return flat_tensor(take(start, stop)).untyped_storage()

    other = DataMismatchError(f"{file}: its storages are not those of its pickle")
    with damage(file, "torch cannot read it"):
        pickled = index.read_pickle(source)
        options: dict[str, Any] = {"weights_only": weights_only, "map_location": str(device)}
        try:
            state = unpickled(pickled, storage_of, **options)
        except pickle.UnpicklingError:
            source.seek(0)  # torch.load raises its own error, which says what to do
            torch.load(cast(IO[bytes], source), map_location="meta", weights_only=weights_only)
            raise
    if left:
        raise other
    return state


def load(
    path: str,
    target: str | Path,
    writer: WriterLike,
    *,
    device: str | torch.device = "cpu",
    allocate: Allocate | None = None,
    weights_only: bool = True,
) -> tuple[Any, Transfer]:
    """Restore the torch file `target/path`. Return the object and the Transfer.

    One read of the whole file through the writer's path fills all storages. They are on `device`
    ("cpu", "cuda", "cuda:1"), whatever device they were saved from. `allocate` replaces `device`;
    see `prepare`. Raises what `prepare` raises, and DataMismatchError for a file that was replaced
    after its inspection.
    """
    writer, file = writer_of(writer), os.path.join(target, path)
    allocate = allocate or allocate_on(device)
    with InspectedFile.opened(file, writer) as source:
        state, image = _prepare(path, file, source, allocate, weights_only)
    moved = writer.read(image, target)
    source.check(file, image)
    return state, moved


def view(memory: Bytes, where: str) -> Any:
    """Return the object of the torch zip in `memory`. Its storages are views of `memory`.

    `where` names the zip in errors. The storages are not aligned: copy from them, and do not
    compute on them. Unpickles only what `weights_only` allows. Raises DataMismatchError.
    """
    source = ImageSource(FileImage.of("file", [memory]))
    index = TorchIndex.read(where, source)
    return _object_of(where, source, index, lambda a, b: memory[a:b], weights_only=True)


@contextmanager
def damage(file: str, what: str) -> Iterator[None]:
    """Turn errors of a damaged `file` into DataMismatchError, failed reads into TransferError.

    Passes on pickle.UnpicklingError.
    """
    try:
        yield
    except IobenchError:
        raise
    except (*DAMAGE, OSError) as error:
        # EINVAL: a seek to where a damaged directory points.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise TransferError.wrap(error, "opening", file) from error
        first_line = str(error).partition("\n")[0]
        raise DataMismatchError(f"{file}: {what} ({type(error).__name__}: {first_line})") from error


@dataclass(frozen=True, kw_only=True)
class TorchIndex:
    """The records of a file of torch.save."""

    size_bytes: int
    directory: ZipDirectory
    starts: list[int] = field(repr=False)
    """The offset of each storage in the order of their keys; 0 for an empty one."""
    stops: list[int] = field(repr=False)
    pickled: tuple[int, int]
    """[start, stop) of `data.pkl`."""

    @classmethod
    def read(cls, file: str, opened: Source) -> Self:
        """Read the index of the torch zip `opened`; `file` names it in errors.

        Raises DataMismatchError for other files, also those of the other byte order, and
        TransferError.
        """
        with damage(file, "not a torch zip file"):
            return cls._read(opened)

    @classmethod
    def _read(cls, opened: Source) -> Self:
        directory = ZipDirectory.read(opened)
        named = {name: number for number, name in enumerate(directory.names)}
        folder = next((n.removesuffix("/data.pkl") for n in named if n.endswith("/data.pkl")), "")
        if not folder or f"{folder}/version" not in named:
            raise zipfile.BadZipFile("its records are not those of torch.save")
        if f"{folder}/constants.pkl" in named:
            raise zipfile.BadZipFile("it is a TorchScript archive")
        order, whole = named.get(f"{folder}/byteorder"), named[f"{folder}/data.pkl"]
        if order is None:
            if get_default_load_endianness() is _OTHER:
                raise zipfile.BadZipFile("it is to be read in another byte order")
        else:
            (start,) = directory.data_starts(opened, [order])
            opened.seek(start)
            byteorder = opened.read(min(directory.sizes[order], 16))
            if byteorder != sys.byteorder.encode():
                raise zipfile.BadZipFile(f"byte order {byteorder!r} is not this machine's")
        (start,) = directory.data_starts(opened, [whole])
        starts, stops = _storages(opened, directory, named, f"{folder}/data/")
        return cls(
            size_bytes=directory.size_bytes,
            directory=directory,
            starts=starts,
            stops=stops,
            pickled=(start, start + directory.sizes[whole]),
        )

    def filled(self) -> list[int]:
        """Return the keys of the storages that are not empty, in the order of the file."""
        starts, stops = self.starts, self.stops
        keys = [key for key, start in enumerate(starts) if start < stops[key]]
        return sorted(keys, key=starts.__getitem__)

    def read_pickle(self, opened: Source) -> bytes:
        """Return the bytes of `data.pkl`. Raises one of DAMAGE or what `opened` raises."""
        start, stop = self.pickled
        opened.seek(start)
        data = io.BytesIO()
        while data.tell() < stop - start:
            part = opened.read(stop - start - data.tell())
            if not part:
                raise EOFError("its pickle exceeds the file")
            data.write(part)
        return data.getvalue()


def _storages(
    opened: Source, directory: ZipDirectory, named: Mapping[str, int], folder: str
) -> tuple[list[int], list[int]]:
    """Return where each storage begins and ends. Raises one of DAMAGE for any file but torch's."""
    keys = sum(name.startswith(folder) and name[len(folder) :].isdigit() for name in named)
    numbers = []
    for key in range(keys):
        name = f"{folder}{key}"
        if name not in named:
            raise zipfile.BadZipFile(f"its storages are not numbered from 0: {key} is missing")
        if name in directory.compressed:
            raise zipfile.BadZipFile(f"record {name} is compressed")
        numbers.append(named[name])
    filled = [key for key, number in enumerate(numbers) if directory.sizes[number]]
    found = directory.data_starts(opened, [numbers[key] for key in filled])
    starts, stops = [0] * keys, [0] * keys
    for key, start in zip(filled, found, strict=True):
        starts[key], stops[key] = start, start + directory.sizes[numbers[key]]
    end = 0
    for key in sorted(filled, key=starts.__getitem__):
        if starts[key] < end or stops[key] > directory.size_bytes:
            raise zipfile.BadZipFile("its storages overlap or exceed the file")
        end = stops[key]
    return starts, stops


class _Reader:
    """The part of a zip reader that torch needs to unpickle; `load_storage` reads the storages."""

    def __init__(self, pickled: bytes) -> None:
        self._records = {"data.pkl": pickled, "byteorder": sys.byteorder.encode()}

    def has_record(self, name: str) -> bool:
        return name in self._records

    def get_record(self, name: str) -> bytes:
        return self._records[name]

    def serialization_id(self) -> str:
        return ""  # for torch's log of API usage


def unpickled(
    pickled: bytes,
    storage_of: Callable[[str, int, str], Any],
    *,
    weights_only: bool,
    map_location: Any = None,
    pickle_module: Any = pickle,
    **options: Any,
) -> Any:
    """Let torch unpickle the object of a `data.pkl`. Options and errors are those of torch.load.

    `storage_of(key, size_bytes, location)` returns each storage, once for those that are not empty.
    It replaces only the part of torch that reads storages one by one. torch's own Unpickler decides
    what `weights_only` admits. Raises RuntimeError, like torch, for a tensor that exceeds its
    storage.
    """
    module = torch._weights_only_unpickler if weights_only else pickle_module
    shared: dict[str, TypedStorage] = {}

    def load_storage(saved: Any) -> TypedStorage:
        typename, kind, key, location, numel = saved
        if typename not in ("storage", b"storage"):
            raise ValueError(f"a persistent id of {typename!r}")
        found = shared.get(key)
        if found is None:
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            where = location.decode("ascii") if isinstance(location, bytes) else location
            storage = storage_of(key, numel * dtype.itemsize, where)
            found = TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
            made.append((storage, numel * dtype.itemsize))
            if numel:  # like torch, which does not share empty storages
                shared[key] = found
        return found

    made: list[tuple[Any, int]] = []
    loads = [load_storage]

    class Unpickler(module.Unpickler):  # type: ignore[misc, name-defined]  # known at run time only
        """torch assigns its own `persistent_load` to every object. From Python 3.13 on, pickle
        keeps such a function in the object itself, where no property of a class is asked."""

        def persistent_load(self, saved: Any) -> TypedStorage:
            return loads[0](saved)

        def __setattr__(self, name: str, value: Any) -> None:
            if name != "persistent_load":
                super().__setattr__(name, value)

    options.setdefault("encoding", "utf-8")
    own = types.SimpleNamespace(Unpickler=Unpickler)
    try:
        loaded = torch.serialization._load(_Reader(pickled), map_location, own, **options)
    finally:
        loads.clear()  # a class is freed by the garbage collector, and must not keep the storages
    if any(
        storage.nbytes() != size for storage, size in made
    ):  # torch made it larger, without data
        raise RuntimeError("a tensor exceeds its storage")
    return loaded
