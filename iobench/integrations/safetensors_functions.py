"""The drop-ins of `iobench.safetensors`: stock signatures and files, over a writer."""

from __future__ import annotations

import os

import safetensors.torch
import torch

from iobench.integrations import plain_safetensors
from iobench.integrations.bypass import bypass
from iobench.integrations.default_writer import WriterLike, chosen_writer
from iobench.integrations.stock_path import (
    NotOurs,
    check_stock_can_load,
    check_stock_can_save,
    tell,
)

__all__ = ["load_file", "save_file"]


def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    writer: WriterLike | None = None,
) -> None:
    """`safetensors.torch.save_file`, through `writer`: the same file, byte for byte, durable.

    It appears whole, with the permissions that the installed safetensors gives its files. What it
    refuses (tensors that share memory, are sparse or not contiguous), it refuses; what a writer
    cannot do as it does (a link or a pipe at the path, metadata of several keys, which it writes
    in an order left to chance) it does, and the logger `iobench` tells so; in a bucket, which it
    does not know, that raises UsageError. Raises SaveFileError, which is a SafetensorError and an
    OSError, and UnavailableError.
    """
    with bypass():
        try:
            write = plain_safetensors.prepare_save(
                chosen_writer(writer), tensors, filename, metadata
            )
        except NotOurs as why:
            check_stock_can_save("safetensors.torch.save_file", filename, why)
            tell("safetensors.torch.save_file", filename, why)
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
    """`safetensors.torch.load_file`, the file read by `writer`, all of it before this returns.

    The stock function maps the file with `backend="mmap"`; a file larger than the free memory is
    left to it. What cannot be read goes to it too, and its errors are raised; the logger `iobench`
    tells so. It knows no buckets: see `iobench.torch.load` for what is raised of an object.
    """
    chosen = chosen_writer(writer)
    with bypass():
        try:
            return plain_safetensors.load(chosen, filename, device, backend=backend)[0]
        except Exception as why:  # noqa: BLE001 -- safetensors raises its own
            check_stock_can_load("safetensors.torch.load_file", filename, why)
            options = {} if backend == "mmap" else {"backend": backend}
            tensors = safetensors.torch.load_file(filename, device, **options)
            tell("safetensors.torch.load_file", filename, why)
            return tensors
