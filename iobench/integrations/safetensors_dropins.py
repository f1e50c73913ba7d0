"""`save_file`, `load_file`, `safe_open` and `load_sharded` of `iobench.safetensors`.

The first three replace the functions of safetensors and have their signatures plus `writer`.
`prepare_save`, `load_by` and `safetensors_open` do the work, also for `iobench exec`. They raise
Unsupported for calls that a writer cannot make exactly like safetensors; nothing is written then,
and the stock library makes the call.
"""

from __future__ import annotations

import functools
import itertools
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from iobench.errors import SaveError, TransferError
from iobench.formats import safetensors as files
from iobench.formats.safetensors_header import DTYPES
from iobench.formats.tensors import dtype_name
from iobench.integrations import safetensors_open
from iobench.integrations.default_writer import chosen_writer
from iobench.integrations.replacing import bypass
from iobench.integrations.stock_path import (
    StockCall,
    StockPath,
    Unsupported,
    log_fallback,
    path_of,
)
from iobench.writers.base import Writer
from iobench.writers.config import WriterLike
from iobench.writers.transfer import Transfer

if TYPE_CHECKING:
    from iobench.ranks.restore_plan import RestoreMode

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class SaveFileError(SaveError, SafetensorError):
    """A drop-in for save_file failed while writing; callers of save_file catch SafetensorError."""


def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    writer: WriterLike | None = None,
) -> None:
    """Save like `safetensors.torch.save_file`, using `writer`: the same file, byte for byte.

    The file is durable on return and appears complete, with the permissions that the installed
    safetensors gives its files.

    The stock library saves what a writer cannot save in the same way: to a link or a pipe, and with
    metadata of several keys, which it writes in random order. It also raises its own errors for
    tensors that it refuses (sparse, not contiguous or sharing memory). The logger `iobench` reports
    this fallback. The stock library cannot write to buckets, so the same call raises UsageError
    there.

    Raises SaveFileError, which is a SafetensorError and an OSError, and UnavailableError.
    """
    StockCall(
        "safetensors.torch.save_file",
        filename,
        lambda: safetensors.torch.save_file(tensors, filename, metadata),
    ).save(lambda: prepare_save(chosen_writer(writer), tensors, filename, metadata))


def load_file(
    filename: str | os.PathLike[str],
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
    writer: WriterLike | None = None,
) -> dict[str, torch.Tensor]:
    """Load like `safetensors.torch.load_file`; `writer` reads the whole file before this returns.

    The stock function maps the file with `backend="mmap"`. It loads files larger than the free
    memory, and what the writer cannot read; its own errors are raised then. The logger `iobench`
    reports this fallback. The stock function cannot read buckets: `iobench.torch.load` lists what
    is raised for an object.
    """
    chosen = chosen_writer(writer)
    loaded: dict[str, torch.Tensor] = StockCall(
        "safetensors.torch.load_file",
        filename,
        lambda: safetensors.torch.load_file(filename, device, backend=backend),
    ).load(lambda: load_by(chosen, filename, device, backend=backend))
    return loaded


def safe_open(
    filename: str | os.PathLike[str],
    framework: str,
    device: str | int | None = "cpu",
    *,
    backend: str = "mmap",
    writer: WriterLike | None = None,
) -> Any:
    """Open like `safetensors.safe_open`; `writer` reads each tensor or slice when it is asked for.

    Only the ranges of a slice are read. Columns are the exception: gaps below 1 MiB between their
    rows are read too, and dropped. Each call returns memory of its own; tensors of the stock class
    are views of the mapped file. No file stays open: a file that was replaced since raises
    DataMismatchError.

    The stock class opens the file for other frameworks than torch and other devices than CPU and
    CUDA, and it reads what the writer cannot read or the free memory cannot hold. The logger
    `iobench` reports that. The stock class cannot read buckets: `iobench.torch.load` lists what is
    raised for an object.
    """
    chosen = chosen_writer(writer)

    def on_stock(why: Exception) -> None:
        log_fallback(safetensors_open.NAME, filename, why)

    def ours() -> tuple[safetensors_open.OpenFile, None]:
        return safetensors_open.OpenFile(
            chosen, filename, framework, device, backend=backend, on_stock=on_stock
        ), None

    return StockCall(
        safetensors_open.NAME,
        filename,
        lambda: safetensors.safe_open(filename, framework, device, backend=backend),
    ).load(ours)


def load_sharded(
    location: str | os.PathLike[str],
    like: Mapping[str, Any],
    *,
    restore_mode: RestoreMode = "auto",
    writer: WriterLike | None = None,
) -> tuple[dict[str, Any], Transfer]:
    """Return the parts of a model that `like` names, and how they were read.

    `location` is a safetensors file or a directory of them, on a file system or in a bucket. `like`
    maps names of tensors to what this rank wants: a DTensor (its part, with the same sharding, on
    the device of its mesh), a tensor (all of it, on the same device, or on the CPU for meta), or an
    index such as a slice or a tuple of slices (that slice, on the CPU).

    With `restore_mode="all"` each rank reads its parts by itself. With "auto", "broadcast" and
    "all-gather" all ranks of the job call this, with a `like` of their own: bytes that several of
    them want are read once and exchanged. Of columns the gaps below 1 MiB between the rows count as
    wanted, so ranks that cut a matrix by columns read it once together. `read_amplification` of the
    Transfer is what was read, divided by what is wanted.

    Safetensors has no checksums: only sizes and headers are compared. Raises TargetError if there
    are no such files, StateMismatchError for a tensor that the model lacks or that has another
    shape or dtype, the errors of torch for an index, DataMismatchError, TransferError, and
    RankError for a rank that is lost.
    """
    from iobench.exports import sharded  # here: it takes time to import

    chosen = chosen_writer(writer)
    return sharded.load_sharded(os.fspath(location), like, chosen, restore_mode=restore_mode)


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
        mode = _stock_mode()
    if mode is None:
        raise Unsupported(f"safetensors {safetensors.__version__} writes files in another way")
    target = StockPath.of(path, writer, stock_renames=True)
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
        if "file" in writer.schemes:
            os.chmod(target.path, mode)
        return moved

    return write


def load_by(
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
        safetensors_open.check_memory(os.stat(path).st_size)
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


@functools.cache
def _stock_mode() -> int | None:
    """Return the mode of the files that safetensors makes. Save a small file once to see it.

    None where the bytes differ from our image, or where it writes into an old file, like before
    0.8, instead of a rename.
    """
    tensors = {
        "b": torch.arange(3.0, device="cpu"),
        "a": torch.arange(5, device="cpu"),
        "é\n": torch.ones(2, 2, dtype=torch.bfloat16, device="cpu"),
        "none": torch.zeros(0, dtype=torch.uint8, device="cpu"),
    }
    metadata = {"format": "pt"}
    with tempfile.TemporaryDirectory(prefix="iobench-safetensors-") as directory:
        file = Path(directory, "a.safetensors")
        file.touch()
        before = file.stat()
        safetensors.torch.save_file(tensors, file, metadata=metadata)
        after = file.stat()
        made = files.image("a.safetensors", tensors, metadata)
        joined = b"".join(view.tobytes() for view in made.views(0, made.size_bytes))
        same = joined == file.read_bytes() and after.st_ino != before.st_ino
    return stat.S_IMODE(after.st_mode) if same else None
