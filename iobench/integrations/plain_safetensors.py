"""`safetensors.torch.save_file` and `load_file` over a writer; see `plain_torch`."""

from __future__ import annotations

import functools
import itertools
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from iobench.environment.memory import available_bytes
from iobench.errors import SaveError, TransferError
from iobench.formats import safetensors as files
from iobench.formats.safetensors_header import DTYPES
from iobench.formats.tensors import dtype_name
from iobench.integrations.bypass import bypass
from iobench.integrations.stock_path import NotOurs, StockPath, path_of
from iobench.writers.base import Writer
from iobench.writers.transfer import Transfer

__all__ = ["SaveFileError", "load", "prepare_save"]

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class SaveFileError(SaveError, SafetensorError):
    """A drop-in for save_file failed while writing: for whoever expects a SafetensorError."""


def prepare_save(
    writer: Writer, tensors: Any, filename: Any, metadata: Any = None
) -> Callable[[], Transfer]:
    """Describe the file that `save_file` would make; what is returned writes it, durable.

    Raises NotOurs. The returned function raises SaveFileError and UnavailableError.
    """
    path = path_of(filename)
    _check_tensors(tensors)
    if metadata is not None and not _is_plain(metadata):
        raise NotOurs("metadata that it refuses, or whose order it leaves to chance")
    with bypass():
        stock = _stock_habits()
    if stock is None:
        raise NotOurs(f"safetensors {safetensors.__version__} makes other files")
    place = StockPath.of(path, writer, stock_renames=stock.renames)
    try:
        image = files.image(place.name, tensors, metadata)
    except ValueError as error:
        raise NotOurs(f"what no safetensors file can hold ({error})") from error
    place.check_room(image.size_bytes)

    def write() -> Transfer:
        try:
            moved = writer.write(image, place.directory)
        except TransferError as error:
            raise SaveFileError.of(error) from error
        if stock.mode is not None and "file" in writer.schemes:
            os.chmod(place.path, stock.mode)
        return moved

    return write


def load(
    writer: Writer, filename: Any, device: Any = "cpu", *, backend: str = "mmap"
) -> tuple[dict[str, torch.Tensor], Transfer]:
    """What `load_file` returns, read now and not when it is looked at.

    Raises NotOurs, and what else goes wrong as it is.
    """
    if backend not in ("mmap", "pread"):
        raise NotOurs("a backend of its own")
    path = path_of(filename)
    place = StockPath.of_stored(path, writer)
    on = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if on.type not in ("cpu", "cuda"):
        raise NotOurs(f"device {on.type}")
    if on.type == "cpu" and backend == "mmap" and "file" in writer.schemes:
        _check_memory(os.stat(path).st_size)
    return files.load(place.name, place.directory, writer, device=on)


def _check_tensors(tensors: Any) -> None:
    """Raise NotOurs for what save_file refuses, or writes otherwise than our image has it."""
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise NotOurs("no dict of tensors")
    areas: dict[torch.device, list[tuple[int, int]]] = {}
    for tensor in tensors.values():
        if type(tensor) not in _PLAIN:
            raise NotOurs("a value that is no plain tensor")
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise NotOurs("a tensor that is sparse or not contiguous")
        if tensor.is_conj() or tensor.is_neg():
            raise NotOurs("a tensor that is a conjugated or negated view")
        if tensor.device.type not in ("cpu", "cuda") or dtype_name(tensor.dtype) not in DTYPES:
            raise NotOurs(f"a tensor of {tensor.dtype} on {tensor.device.type}")
        if tensor.numel():
            start = tensor.data_ptr()
            areas.setdefault(tensor.device, []).append((start, start + tensor.nbytes))
    for found in areas.values():
        found.sort()
        if any(begin < end for (_, end), (begin, _) in itertools.pairwise(found)):
            raise NotOurs("tensors that share memory")


def _is_plain(metadata: Any) -> bool:
    return (
        isinstance(metadata, dict)
        and len(metadata) == 1
        and all(isinstance(text, str) for pair in metadata.items() for text in pair)
    )


def _check_memory(size_bytes: int) -> None:
    """A mapped file takes no memory until it is used, and processes share it; ours is read."""
    available = available_bytes()
    readers = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if available is not None and size_bytes * readers > available:
        raise NotOurs("more than the memory that is free; stock maps the file")


@dataclass(frozen=True, kw_only=True)
class _Habits:
    """What the installed safetensors does: a new file by rename? With which mode?

    None for that of the file that is there, or of any new one: a writer gives it the same.
    """

    renames: bool
    mode: int | None


@functools.cache
def _stock_habits() -> _Habits | None:
    """Found by trying, once per process; None where its bytes are not those of our image."""
    tensors = {
        "b": torch.arange(3.0, device="cpu"),
        "a": torch.arange(5, device="cpu"),
        "é\n": torch.ones(2, 2, dtype=torch.bfloat16, device="cpu"),
        "none": torch.zeros(0, dtype=torch.uint8, device="cpu"),
    }
    metadata = {"format": "pt"}
    with tempfile.TemporaryDirectory(prefix="iobench-safetensors-") as directory:
        file, plain = Path(directory, "a.safetensors"), Path(directory, "plain")
        for path in (file, plain):
            path.touch()
        before, as_new = file.stat(), stat.S_IMODE(plain.stat().st_mode)
        safetensors.torch.save_file(tensors, file, metadata=metadata)
        after = file.stat()
        made = files.image("a.safetensors", tensors, metadata)
        joined = b"".join(view.tobytes() for view in made.views(0, made.size_bytes))
        if joined != file.read_bytes():
            return None
    mode = stat.S_IMODE(after.st_mode)
    renames = (after.st_dev, after.st_ino) != (before.st_dev, before.st_ino)
    return _Habits(renames=renames, mode=mode if renames or mode != as_new else None)
