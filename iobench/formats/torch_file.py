"""torch files: the stock `torch.save` zip, written without copying tensors, read in parallel."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch

from iobench.errors import DataMismatchError
from iobench.formats import torch_image
from iobench.formats.file_memory import FileMemory
from iobench.formats.inspected_file import InspectedFile
from iobench.formats.tensors import Allocate, OnDevice, allocate_on, flat_tensor
from iobench.formats.torch_index import TorchIndex, damage, unpickled
from iobench.writers.base import ImageSource, Source, Writer
from iobench.writers.config import WriterLike, writer_of
from iobench.writers.image import AnyMemory, Bytes, FileImage
from iobench.writers.transfer import Transfer

__all__ = ["load", "prepare", "save", "view"]

_WIDEST = 16  # bytes of the widest value, complex128; torch.save puts storages at multiples of 64
_HOST = torch.device("cpu")


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
    state = _unpickled(
        *(file, source, index, lambda start, stop: memory.take(start, stop, _WIDEST)),
        weights_only=weights_only,
        device=allocate.device if isinstance(allocate, OnDevice) else _HOST,
    )
    return state, memory.image(path)


def _unpickled(
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
    return _unpickled(where, source, index, lambda a, b: memory[a:b], weights_only=True)
