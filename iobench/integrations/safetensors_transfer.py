"""The work of `iobench.safetensors` and `iobench exec`: save_file and load_file using a writer.

Calls that a writer cannot make exactly like safetensors raise Unsupported; then nothing is written.
`safetensors_dropins` has the functions with the stock signatures.
"""

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
from iobench.integrations.replacing import bypass
from iobench.integrations.stock_path import StockPath, Unsupported, path_of
from iobench.writers.base import Writer
from iobench.writers.transfer import Transfer

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class SaveFileError(SaveError, SafetensorError):
    """A drop-in for save_file failed while writing; callers of save_file catch SafetensorError."""


def prepare_save(
    writer: Writer, tensors: Any, filename: Any, metadata: Any = None
) -> Callable[[], Transfer]:
    """Describe the file that `save_file` would make. Return a function that writes it durably.

    Raises Unsupported. The returned function raises SaveFileError and UnavailableError.
    """
    path = path_of(filename)
    _check_tensors(tensors)
    if metadata is not None and not _is_plain(metadata):
        raise Unsupported("metadata that safetensors refuses, or writes in random order")
    with bypass():
        stock = _stock_behaviour()
    if stock is None:
        raise Unsupported(f"safetensors {safetensors.__version__} writes different bytes")
    target = StockPath.of(path, writer, stock_renames=stock.renames)
    try:
        image = files.image(target.name, tensors, metadata)
    except ValueError as error:
        raise Unsupported(f"a safetensors file cannot hold it ({error})") from error
    target.check_room(image.size_bytes)

    def write() -> Transfer:
        try:
            moved = writer.write(image, target.directory)
        except TransferError as error:
            raise SaveFileError.of(error) from error
        if stock.mode is not None and "file" in writer.schemes:
            os.chmod(target.path, stock.mode)
        return moved

    return write


def load(
    writer: Writer, filename: Any, device: Any = "cpu", *, backend: str = "mmap"
) -> tuple[dict[str, torch.Tensor], Transfer]:
    """Return what `load_file` returns, but read the whole file now, not on first access.

    Raises Unsupported, and every other error unchanged.
    """
    if backend not in ("mmap", "pread"):
        raise Unsupported(f"backend {backend!r}, neither mmap nor pread")
    path = path_of(filename)
    target = StockPath.of_stored(path, writer)
    on = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if on.type not in ("cpu", "cuda"):
        raise Unsupported(f"device {on.type}")
    if on.type == "cpu" and backend == "mmap" and "file" in writer.schemes:
        check_memory(os.stat(path).st_size)
    return files.load(target.name, target.directory, writer, device=on)


def _check_tensors(tensors: Any) -> None:
    """Raise Unsupported for tensors that save_file refuses or whose bytes differ in our image."""
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise Unsupported("not a dict of tensors")
    areas: dict[torch.device, list[tuple[int, int]]] = {}
    for tensor in tensors.values():
        if type(tensor) not in _PLAIN:
            raise Unsupported("a value that is not a plain tensor")
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise Unsupported("a tensor that is sparse or not contiguous")
        if tensor.is_conj() or tensor.is_neg():
            raise Unsupported("a tensor that is a conjugated or negated view")
        if tensor.device.type not in ("cpu", "cuda") or dtype_name(tensor.dtype) not in DTYPES:
            raise Unsupported(f"a tensor of {tensor.dtype} on {tensor.device.type}")
        if tensor.numel():
            start = tensor.data_ptr()
            areas.setdefault(tensor.device, []).append((start, start + tensor.nbytes))
    for found in areas.values():
        found.sort()
        if any(begin < end for (_, end), (begin, _) in itertools.pairwise(found)):
            raise Unsupported("tensors that share memory")


def _is_plain(metadata: Any) -> bool:
    return (
        isinstance(metadata, dict)
        and len(metadata) == 1
        and all(isinstance(text, str) for pair in metadata.items() for text in pair)
    )


def check_memory(size_bytes: int) -> None:
    """Raise Unsupported when the free memory cannot hold so much of a file in each local process.

    A mapped file takes memory only when it is accessed, and processes share its pages. We read
    into private memory.
    """
    available = available_bytes()
    readers = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if available is not None and size_bytes * readers > available:
        raise Unsupported("the file is larger than the free memory; stock maps it")


@dataclass(frozen=True, kw_only=True)
class _StockBehaviour:
    """How the installed safetensors creates a file: whether by rename, and with which mode.

    `mode` is None when it is the mode that a writer gives the file too: that of the old file, or
    the default of a new one.
    """

    renames: bool
    mode: int | None


@functools.cache
def _stock_behaviour() -> _StockBehaviour | None:
    """Save a small file and look, once per process; None where its bytes differ from our image."""
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
    return _StockBehaviour(renames=renames, mode=mode if renames or mode != as_new else None)
