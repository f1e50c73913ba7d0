"""`save_file`, `load_file` and `safe_open` of `iobench.safetensors`: drop-in replacements.

They have the stock signatures plus `writer`. `safetensors_transfer` and `safetensors_open` do the
work; what they cannot do exactly like the stock library, these functions pass on to that library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

from iobench.integrations import safetensors_open, safetensors_transfer
from iobench.integrations.default_writer import chosen_writer
from iobench.integrations.replacing import bypass
from iobench.integrations.stock_path import (
    Unsupported,
    check_stock_can_load,
    check_stock_can_save,
    log_fallback,
)
from iobench.writers.config import WriterLike

if TYPE_CHECKING:
    from iobench.ranks.restore_plan import RestoreMode
    from iobench.writers.transfer import Transfer


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
    with bypass():
        try:
            write = safetensors_transfer.prepare_save(
                chosen_writer(writer), tensors, filename, metadata
            )
        except Unsupported as why:
            check_stock_can_save("safetensors.torch.save_file", filename, why)
            log_fallback("safetensors.torch.save_file", filename, why)
            safetensors.torch.save_file(tensors, filename, metadata)
        else:
            write()


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
    with bypass():
        try:
            return safetensors_transfer.load(chosen, filename, device, backend=backend)[0]
        except Exception as why:  # noqa: BLE001 -- safetensors loads it, or raises its own error
            check_stock_can_load("safetensors.torch.load_file", filename, why)
            tensors = safetensors.torch.load_file(filename, device, backend=backend)
            log_fallback("safetensors.torch.load_file", filename, why)
            return tensors


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

    try:
        return safetensors_open.opened(
            chosen, filename, framework, device, backend=backend, on_stock=on_stock
        )
    except Exception as why:  # noqa: BLE001 -- safetensors opens it, or raises its own error
        check_stock_can_load(safetensors_open.NAME, filename, why)
        with bypass():
            opened = safetensors.safe_open(filename, framework, device, backend=backend)
        on_stock(why)
        return opened


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
    from iobench.checkpoint import sharded  # here: it takes time to import

    chosen = chosen_writer(writer)
    return sharded.load_sharded(os.fspath(location), like, chosen, restore_mode=restore_mode)
